"""Scenarios of the node agent: its memory is reused, and its connections are lost."""

from dataclasses import replace
from typing import Final

from objkv.connector.kv.metadata import StepPlan
from tests.device.ordering.rig import OrderRig, Scenario
from tests.device.ordering.setup import WHOLE, Pages, Setup, equal

_FIRST, _CHUNKS, _OWNER, _SLOW_S = 8, range(4), 7.0, 0.1


def connection_is_lost(rig: OrderRig) -> bool:
    """Copies from the arena that are queued when the connection to its agent is lost"""
    _load_late(rig, "r")
    before = rig.agent
    before.is_lost = True
    rig.loader.cancel("unknown")  # wakes its thread
    rig.until_received("r")
    if rig.worker.take_failed_blocks():
        rig.write(_FIRST, _blocks(rig), _OWNER)
        rig.synchronize()
        if not rig.holds(_read(rig), _OWNER):
            return False
    rig.wait_until(lambda: rig.loader.link.agent not in (None, before))
    return _is_right(rig, "again")


def memory_is_reused(rig: OrderRig) -> bool:
    """An arena with room for few payloads, whose memory is overwritten when its leases end"""
    for number in range(6):
        rig.delay_loads(_SLOW_S / 4)
        if not _is_right(rig, f"r{number}", sync=bool(number % 2)):
            return False
    return True


def _load_late(rig: OrderRig, request: str) -> None:
    """Load with all copies queued behind a delay."""
    rig.delay_loads(_SLOW_S)
    rig.step(StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request=request),)))
    nbytes = len(_CHUNKS) * rig.pages.raw_bytes
    rig.wait_until(lambda: rig.recorder.value("load_bytes") >= nbytes)


def _is_right(rig: OrderRig, request: str, *, sync: bool = False) -> bool:
    """Load, and compare all bytes."""
    plan = StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request=request, sync=sync),))
    if sync:
        rig.begin(plan)
        rig.worker.start_loads(plan)
        rig.end(plan)
    else:
        rig.step(plan)
        rig.until_received(request)
    return not rig.worker.take_failed_blocks() and equal(_read(rig), rig.expected(_CHUNKS))


def _blocks(rig: OrderRig) -> int:
    return len(_CHUNKS) * rig.setup.layout.chunk_blocks


def _read(rig: OrderRig) -> Pages:
    return rig.read(_FIRST, _blocks(rig))


_TWO_SLABS = Setup(load_slabs=2)
SCENARIOS: Final = (
    Scenario("connection lost", connection_is_lost),
    Scenario("memory reused", memory_is_reused, _TWO_SLABS),
    Scenario("memory reused, whole blocks", memory_is_reused, replace(_TWO_SLABS, layout=WHOLE)),
)
