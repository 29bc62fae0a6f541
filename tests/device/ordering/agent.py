"""Scenarios of the node agent: its memory is reused, its connections are lost, it is killed."""

import time
from dataclasses import replace
from typing import Final

from objkv.connector.kv.metadata import StepPlan
from tests.device.ordering.rig import OrderRig, Scenario
from tests.device.ordering.setup import WHOLE, Pages, Setup, equal

_FIRST, _CHUNKS, _OWNER, _SLOW_S = 8, range(4), 7.0, 0.1
_KILLS = 2


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


def agent_is_killed(rig: OrderRig) -> bool:
    """Loads from the memory of an agent that is killed meanwhile, and from that of the next"""
    for number in range(_KILLS):
        with rig.agent_process() as agent:
            if not _is_right(rig, f"before {number}"):
                return False
            rig.write(_FIRST, _blocks(rig), _OWNER)
            rig.delay_loads(rig.random.uniform(0, _SLOW_S))
            rig.step(StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request="r"),)))
            time.sleep(rig.random.uniform(0, _SLOW_S / 10))
            agent.kill()
            rig.until_received("r")
            failed = rig.worker.take_failed_blocks()
            right = [n for n in range(_blocks(rig)) if _FIRST + n not in failed]
            found, expected = _read(rig), rig.expected(_CHUNKS)
            if not equal([page[right] for page in found], [page[right] for page in expected]):
                return False
    before = rig.loader.link.agent
    rig.restart()
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
    Scenario("agent killed", agent_is_killed, Setup(deadline_s=10.0)),
    Scenario("memory reused", memory_is_reused, _TWO_SLABS),
    Scenario("memory reused, whole blocks", memory_is_reused, replace(_TWO_SLABS, layout=WHOLE)),
)
