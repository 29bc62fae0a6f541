"""Scenarios of saves: what they must follow, and what must wait for them."""

from collections.abc import Iterable
from threading import Event, Timer
from typing import Any

from objkv.connector.kv.metadata import StepPlan
from objkv.errors import TransferError
from objkv.transfer.saver import COPIES_S
from tests.device.ordering.rig import SLOW_S, WHOLE, OrderRig, Scenario, Setup

_CLOSING_S = 0.4
"""Longer than all else takes that is closed with a saver, and shorter than a saver waits."""
_FIRST = 8
"""First block of the saved chunks."""
_CHUNKS = range(3)
_THEN, _LATER = 5.0, 9.0
"""Contents of the blocks: when they are saved, and of their next owner."""


def follows_forward(rig: OrderRig) -> bool:
    """A save of blocks that the forward pass still writes"""
    _write(rig, 1.0)
    rig.synchronize()
    rig.delay_compute(SLOW_S)
    _write(rig, _THEN)
    rig.end(_plan(rig))
    return _are_stored(rig)


def does_not_run_between_kernels(rig: OrderRig) -> bool:
    """A save that is stored while kernels launched in the same moment still compute"""

    def launch(call: str) -> None:
        if call == "follow":
            rig.delay_compute(SLOW_S)

    _write(rig, _THEN)
    rig.on_call = launch
    rig.end(_plan(rig))
    return _are_stored(rig)


def is_complete_when_stored(rig: OrderRig) -> bool:
    """A save that is stored as soon as its pages are in host memory"""
    _save_late(rig)
    return _are_stored(rig)


def is_read_before_preempted(rig: OrderRig) -> bool:
    """Blocks that have a new owner after their request was preempted"""
    _save_late(rig)
    rig.step(StepPlan(reused=frozenset({"r"})), lambda: _write(rig, _LATER))
    return _are_stored(rig)


def is_read_in_each_step(rig: OrderRig) -> bool:
    """Blocks of two preempted requests whose chunks were saved in several steps"""
    _write(rig, _THEN)
    rig.synchronize()
    for chunk, request in zip(_CHUNKS, ("a", "b", "a"), strict=True):
        rig.delay_saves(SLOW_S / 2)
        first = _FIRST + chunk * rig.setup.layout.chunk_blocks
        rig.end(StepPlan(saves=(rig.save_plan([chunk], first, request=request),)))
    rig.step(StepPlan(reused=frozenset({"a", "b"})), lambda: _write(rig, _LATER))
    return _are_stored(rig)


def is_read_before_window(rig: OrderRig) -> bool:
    """Blocks that have left the window of their request and have a new owner in the next step"""
    _save_late(rig)
    rig.step(StepPlan(), lambda: _write(rig, _LATER))
    return _are_stored(rig)


def is_read_before_zeroed(rig: OrderRig) -> bool:
    """Blocks that a model runner zeroes for the next step before it reports preemptions"""
    _write_and_delay(rig)
    rig.end(_plan(rig, may_reuse=True))
    _write(rig, _LATER)
    return _are_stored(rig)


class _Held:
    """Holds the thread that gathers, each time that it is about to submit a step's copies."""

    def __init__(self, rig: OrderRig) -> None:
        self._rig, self._came, self._go = rig, Event(), Event()
        rig.on_call = self._note

    def _note(self, call: str) -> None:
        if call == "follow":
            self._came.set()
            if not self._go.wait(self._rig.setup.patience_s):
                raise TransferError("held for ever")

    def save(self, requests: Iterable[str]) -> None:
        """Run a step for each request, which saves a chunk. The thread has begun the first."""
        for chunk, request in zip(_CHUNKS, requests, strict=False):
            first = _FIRST + chunk * self._rig.setup.layout.chunk_blocks
            plan = self._rig.save_plan([chunk], first, request=request)
            self._rig.step(StepPlan(saves=(plan,)))
            assert self._came.wait(self._rig.setup.patience_s)

    def let_go(self, seconds: float = 0.0) -> None:
        if seconds:
            Timer(seconds, self._go.set).start()
        else:
            self._go.set()


def is_submitted_before_preempted(rig: OrderRig) -> bool:
    """Blocks of requests that are preempted before copies of their chunks are submitted"""
    _write_and_delay(rig)
    held = _Held(rig)
    held.save("abc")
    held.let_go(SLOW_S)
    rig.step(StepPlan(reused=frozenset("abc")), lambda: _write(rig, _LATER))
    return _are_stored(rig)


def is_submitted_before_window(rig: OrderRig) -> bool:
    """Blocks that leave a window before copies of their chunks are submitted"""
    _write_and_delay(rig)
    held = _Held(rig)
    rig.end(_plan(rig))
    held.let_go(SLOW_S)
    rig.step(StepPlan(), lambda: _write(rig, _LATER))
    return _are_stored(rig)


def is_dropped_before_reused(rig: OrderRig) -> bool:
    """Blocks of preempted requests whose chunks are not submitted as long as a fence waits"""
    _write(rig, _THEN)
    held = _Held(rig)
    held.save("abc")
    rig.step(StepPlan(reused=frozenset("abc")), lambda: _write(rig, _LATER))
    held.let_go()
    return all((pages := rig.stored(chunk)) is None or rig.holds(pages, _THEN) for chunk in _CHUNKS)


def is_read_while_queued(rig: OrderRig) -> bool:
    """Blocks of finished requests that were asked for before copies of their chunks are
    submitted"""
    _write(rig, _THEN)
    held = _Held(rig)
    held.save("abc")
    for request in "abc":
        rig.report(StepPlan(held=frozenset({request})))
    held.let_go(SLOW_S)
    rig.until_sent("c")
    _write(rig, _LATER)
    return _are_stored(rig)


def is_not_read_after_closing(rig: OrderRig) -> bool:
    """Blocks that are unmapped after the worker was closed with saves in its queue"""
    _write(rig, _THEN)
    held, closed, late = _Held(rig), Event(), list[str]()
    held.save("ab")
    held.let_go(SLOW_S)

    def note(call: str) -> None:
        if call == "follow":
            closed.wait(rig.setup.patience_s)
        if closed.is_set():
            late.append(call)

    rig.on_call = note
    rig.worker.close()
    closed.set()
    rig.saver.drain(rig.setup.patience_s)
    return not late


def is_read_before_freed(rig: OrderRig) -> bool:
    """Blocks that have a new owner after their finished request was reported as sent"""
    _save_late(rig)
    rig.until_sent()
    _write(rig, _LATER)
    return _are_stored(rig)


def late(rig: OrderRig) -> bool:
    """Slabs of chunks that are dropped at their deadline, while their copies are queued"""
    _save_late(rig)
    return _slabs_are_unused(rig)


def keeps_slabs_of_failures(rig: OrderRig) -> bool:
    """Slabs of a gather that failed after its copies were queued"""

    def fail(call: str) -> None:
        if call == "gather":
            raise TransferError("no memory for staging")

    rig.on_call = fail
    _save_late(rig)
    return _slabs_are_unused(rig)


def keeps_slabs_of_closed(rig: OrderRig) -> bool:
    """Slabs of a gather that goes on after its saver was closed"""
    _write(rig, _THEN)
    rig.synchronize()
    held = _Held(rig)
    held.save("a")
    rig.delay_saves(COPIES_S + _CLOSING_S)
    rig.saver.close(0.0)
    held.let_go()
    rig.saver.drain(rig.setup.patience_s)
    return _slabs_are_unused(rig)


def closed(rig: OrderRig) -> bool:
    """Slabs and blocks that have a new owner after the worker was closed during a save"""
    _save_late(rig, _CLOSING_S)
    rig.wait_until(lambda: rig.save_slabs.leased > 0)  # a step that is queued would be dropped
    return rig.close_safely() and _slabs_are_unused(rig)


def on_another_device(rig: OrderRig) -> bool:
    """A step whose thread has selected another device"""
    with rig.other_device() as has_another:
        return not has_another or is_read_before_preempted(rig)


def _plan(rig: OrderRig, **how: Any) -> StepPlan:
    return StepPlan(saves=(rig.save_plan(_CHUNKS, _FIRST),), **how)


def _write_and_delay(rig: OrderRig, seconds: float = SLOW_S) -> None:
    _write(rig, _THEN)
    rig.synchronize()
    rig.delay_saves(seconds)


def _save_late(rig: OrderRig, seconds: float = SLOW_S) -> None:
    _write_and_delay(rig, seconds)
    rig.step(_plan(rig))


def _write(rig: OrderRig, value: float) -> None:
    rig.write(_FIRST, len(_CHUNKS) * rig.setup.layout.chunk_blocks, value)


def _are_stored(rig: OrderRig) -> bool:
    return all(rig.holds(rig.stored(chunk), _THEN) for chunk in _CHUNKS)


def _slabs_are_unused(rig: OrderRig) -> bool:
    """Whether no copy writes to a slab that can be leased. Takes each slab as soon as it is free
    and overwrites it."""
    taken = rig.take_all_slabs(rig.save_slabs)
    rig.synchronize()
    return rig.give_back(taken)


SCENARIOS = (
    Scenario("forward, then save", follows_forward),
    Scenario("forward, then save, whole blocks", follows_forward, Setup(layout=WHOLE)),
    Scenario("save among kernels", does_not_run_between_kernels, Setup(watched=True)),
    Scenario("save, then store", is_complete_when_stored),
    Scenario("save, then store, whole blocks", is_complete_when_stored, Setup(layout=WHOLE)),
    Scenario("save preempted", is_read_before_preempted),
    Scenario("saves of several steps preempted", is_read_in_each_step),
    Scenario("save, then window", is_read_before_window, Setup(windowed=True)),
    Scenario("save, then zero", is_read_before_zeroed, Setup(writes_early=True)),
    Scenario("save finished", is_read_before_freed),
    Scenario("queued save preempted", is_submitted_before_preempted, Setup(watched=True)),
    Scenario(
        "queued save, then window", is_submitted_before_window, Setup(watched=True, windowed=True)
    ),
    Scenario("save that is never submitted", is_dropped_before_reused, Setup(watched=True)),
    Scenario("queued save finished", is_read_while_queued, Setup(watched=True)),
    Scenario(
        "closed with queued saves",
        is_not_read_after_closing,
        Setup(watched=True, drain_deadline_ms=0),
    ),
    Scenario("save past its deadline", late, Setup(save_deadline_s=0.02)),
    Scenario("slabs of failed saves", keeps_slabs_of_failures, Setup(watched=True)),
    Scenario("slabs of closed saves", keeps_slabs_of_closed, Setup(watched=True)),
    Scenario("closed during a save", closed, Setup(drain_deadline_ms=0)),
    Scenario("save on another device", on_another_device),
)
