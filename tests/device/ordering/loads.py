"""Scenarios of loads: what they must follow, what must wait for them, and the agent's memory."""

from collections.abc import Callable
from threading import Event, Lock

from objkv.connector.kv.metadata import StepPlan
from tests.device.ordering.rig import LAYERS, SLOW_S, WHOLE, OrderRig, Pages, Scenario, Setup, equal

_LINGER_S = 0.5
"""How long a thread of a load stands still before it queues copies. Longer than the other thread
takes to write on a busy machine."""
_FIRST = 8
"""First block of the loads."""
_CHUNKS = range(4)
_BLANK = 3
"""Number of blocks that a load zeroes."""
_OWNER = 7.0
"""The value that another owner writes into the blocks."""


def follows_compute(rig: OrderRig) -> bool:
    """A load into blocks that an earlier kernel still writes"""
    rig.delay_compute(SLOW_S)
    _write(rig)
    rig.step(_plan(rig))
    rig.until_received()
    return _is_loaded(rig)


def does_not_follow_forward(rig: OrderRig) -> bool:
    """A load that completes while the forward pass of its own step still computes"""

    def is_first(request: str, seconds: float) -> bool:
        plan = _plan(rig, request=request)
        rig.begin(plan)
        rig.delay_compute(seconds)
        forward = rig.loader.mark_compute()
        rig.worker.start_loads(plan)
        rig.end(plan)
        rig.until_received(request)
        was_first = not forward.done()
        assert _is_loaded(rig)
        return was_first

    return rig.attempted(is_first)


def is_complete_when_reported(rig: OrderRig) -> bool:
    """A load whose blocks are read as soon as it is reported"""
    rig.delay_loads(SLOW_S)
    rig.step(_plan(rig))
    rig.until_received()
    return equal(_read(rig), rig.expected(_CHUNKS))


def holds_each_layer(rig: OrderRig) -> bool:
    """Layers that are computed as soon as each of them is loaded"""
    plan = _begun(rig)
    found: Pages = []
    for number, layer in enumerate(LAYERS):
        rig.worker.wait_layer(layer)
        found.append(_read(rig)[number])
    rig.end(plan)
    return _has_loaded(rig, found)


def holds_the_next_step(rig: OrderRig) -> bool:
    """A step that loads layer by layer, and a next one that reads the blocks"""
    rig.end(_begun(rig))
    return _has_loaded(rig, _read(rig))


def holds_speculation(rig: OrderRig) -> bool:
    """A step that loads layer by layer, and whose results are read before it ends"""
    plan = _begun(rig)
    rig.report(plan)
    found = _read(rig)
    rig.worker.end_forward(plan)
    return _has_loaded(rig, found)


def aborted_meanwhile(rig: OrderRig) -> bool:
    """Blocks that have a new owner after a load was aborted while a thread queued its copies"""

    def abort() -> None:
        rig.report(StepPlan(), {"r"})
        rig.until_received()

    return _stays_written_after(rig, abort)


def keeps_its_slabs(rig: OrderRig) -> bool:
    """Slabs that are overwritten as soon as they are free, while copies and kernels are queued"""
    _load_late(rig, compute_s=2 * SLOW_S)
    taken = rig.take_all_slabs(rig.load_slabs)
    rig.until_received()
    return _is_loaded(rig) and rig.give_back(taken)


def keeps_its_memory(rig: OrderRig) -> bool:
    """Memory that is overwritten as soon as no load has it, while copies and kernels are queued"""
    _load_late(rig, compute_s=2 * SLOW_S)
    rig.settle()
    rig.until_received()
    return _is_loaded(rig)


def share_a_lane(rig: OrderRig) -> bool:
    """Loads of several requests at once, which share staging memory"""
    size = len(_CHUNKS) * rig.setup.layout.chunk_blocks
    asked = [(f"r{n}", range(n, n + 4), 1 + n * size) for n in range(5)]
    loads = [rig.load_plan(chunks, first, request=name) for name, chunks, first in asked]
    rig.step(StepPlan(loads=tuple(loads)))
    for name, _, _ in asked:
        rig.until_received(name)
    found = [(rig.read(first, size), rig.expected(chunks)) for _, chunks, first in asked]
    return all(equal(*pages) for pages in found)


def follows_its_own_step(rig: OrderRig) -> bool:
    """Loads of two steps, the second one into blocks that a kernel wrote after the first one"""
    size = len(_CHUNKS) * rig.setup.layout.chunk_blocks
    earlier = StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST + size, request="earlier"),))
    rig.step(earlier)
    rig.delay_compute(SLOW_S)
    _write(rig)
    rig.step(_plan(rig))
    for request in ("earlier", "r"):  # they may end in any order
        rig.until_received(request)
    rig.synchronize()
    first = rig.read(_FIRST + size, size)
    return _is_loaded(rig) and equal(first, rig.expected(_CHUNKS))


def zeroes(rig: OrderRig) -> bool:
    """A load that zeroes blocks which an earlier kernel still writes"""
    first = _FIRST + _blocks(rig)[1]
    rig.delay_compute(SLOW_S)
    rig.write(first, _BLANK, _OWNER)
    blank = range(first, first + _BLANK)
    rig.step(StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, blank=blank),)))
    found = rig.read(first, _BLANK)
    rig.until_received()
    rig.synchronize()
    return _is_loaded(rig) and not any(page.any() for page in found)


def goes_on_fetching(rig: OrderRig) -> bool:
    """Payloads that are fetched by one thread while the device is busy"""

    def is_first(request: str, seconds: float) -> bool:
        rig.delay_loads(seconds)
        behind = rig.load_lane.mark()
        before = rig.recorder.value("load_bytes")
        rig.step(_plan(rig, request=request))
        _until_fetched(rig, before)
        was_first = not behind.done()
        rig.until_received(request)
        assert _is_loaded(rig)
        return was_first

    return rig.attempted(is_first)


def on_another_device(rig: OrderRig) -> bool:
    """A step whose thread has selected another device"""
    with rig.other_device() as has_another:
        return not has_another or (holds_each_layer(rig) and _stays_written(rig))


def connection_is_lost(rig: OrderRig) -> bool:
    """Copies from the arena that are queued when the connection to its agent is lost"""
    _load_late(rig)
    before = rig.agent
    before.is_lost = True
    rig.loader.cancel("unknown")  # wakes its thread
    rig.until_received("r")
    if rig.worker.take_failed_blocks() and not _stays_written(rig):
        return False
    rig.wait_until(lambda: rig.loader.link.agent not in (None, before))
    return _is_right(rig, "again")


def memory_is_reused(rig: OrderRig) -> bool:
    """An arena with room for few payloads, whose memory is overwritten when its leases end"""
    for number in range(6):
        rig.delay_loads(SLOW_S / 4)
        if not _is_right(rig, f"r{number}", sync=bool(number % 2)):
            return False
    return True


def _plan(rig: OrderRig, *, request: str = "r", sync: bool = False) -> StepPlan:
    return StepPlan(loads=(rig.load_plan(_CHUNKS, _FIRST, request=request, sync=sync),))


def _begun(rig: OrderRig) -> StepPlan:
    """A step with loads within it, which have begun late."""
    plan = _plan(rig, sync=True)
    rig.begin(plan)
    rig.delay_loads(SLOW_S)
    rig.worker.start_loads(plan)
    return plan


def _blocks(rig: OrderRig) -> tuple[int, int]:
    return _FIRST, len(_CHUNKS) * rig.setup.layout.chunk_blocks


def _read(rig: OrderRig) -> Pages:
    return rig.read(*_blocks(rig))


def _write(rig: OrderRig) -> None:
    rig.write(*_blocks(rig), _OWNER)


def _is_loaded(rig: OrderRig) -> bool:
    rig.synchronize()
    return equal(_read(rig), rig.expected(_CHUNKS))


def _stays_written(rig: OrderRig) -> bool:
    _write(rig)
    rig.synchronize()
    return rig.holds(_read(rig), _OWNER)


def _stays_written_after(rig: OrderRig, stop: Callable[[], object]) -> bool:
    """Whether the blocks keep what their next owner writes after ``stop`` was called, while a
    thread of the load stood still just before it queued copies."""
    has_entered, has_left, is_written, lingers = Event(), Event(), Event(), Lock()

    def linger(call: str) -> None:
        # One thread only: lanes share a GPU, so that what several add would exceed a bound.
        if call == "scatter" and lingers.acquire(blocking=False):
            rig.delay_loads(3 * SLOW_S)
            has_entered.set()
            is_written.wait(_LINGER_S)
        if call == "mark":
            has_left.set()

    rig.on_call = linger
    rig.step(_plan(rig))
    rig.wait_until(has_entered.is_set)
    stop()
    _write(rig)
    is_written.set()
    rig.wait_until(has_left.is_set)
    rig.synchronize()
    return rig.holds(_read(rig), _OWNER)


def _until_fetched(rig: OrderRig, before: float = 0.0) -> None:
    nbytes = len(_CHUNKS) * rig.pages.raw_bytes
    rig.wait_until(lambda: rig.recorder.value("load_bytes") - before >= nbytes)


def _load_late(rig: OrderRig, compute_s: float = 0.0) -> None:
    rig.delay_loads(SLOW_S)
    rig.step(_plan(rig), lambda: compute_s and rig.delay_compute(compute_s))
    _until_fetched(rig)


def _is_right(rig: OrderRig, request: str, *, sync: bool = False) -> bool:
    rig.step(_plan(rig, request=request, sync=sync))
    if not sync:
        rig.until_received(request)
    return _has_loaded(rig, _read(rig))


def _has_loaded(rig: OrderRig, found: Pages) -> bool:
    return not rig.worker.take_failed_blocks() and equal(found, rig.expected(_CHUNKS))


SCENARIOS = (
    Scenario("load after a kernel", follows_compute),
    Scenario("load after a kernel, whole blocks", follows_compute, Setup(layout=WHOLE)),
    Scenario("load during its forward pass", does_not_follow_forward),
    Scenario("load, then forward", is_complete_when_reported),
    Scenario("load, then forward, whole blocks", is_complete_when_reported, Setup(layout=WHOLE)),
    Scenario("layer by layer", holds_each_layer),
    Scenario("layer by layer, then the next step", holds_the_next_step),
    Scenario("layer by layer, speculating", holds_speculation),
    Scenario("load aborted while queued", aborted_meanwhile, Setup(watched=True)),
    Scenario("memory of loads", keeps_its_memory),
    Scenario("slabs of loads", keeps_its_slabs, Setup(load_slabs=16)),
    Scenario("several loads at once", share_a_lane, Setup(load_threads=4)),
    Scenario("loads of two steps", follows_its_own_step),
    Scenario("load that zeroes blocks", zeroes),
    Scenario("fetching during device work", goes_on_fetching, Setup(load_threads=1)),
    Scenario("load on another device", on_another_device),
    Scenario("connection lost", connection_is_lost),
    Scenario("memory reused", memory_is_reused, Setup(load_slabs=2)),
    Scenario("memory reused, whole blocks", memory_is_reused, Setup(WHOLE, load_slabs=2)),
)
