"""A stage on which threads run one at a time, in an order that a schedule decides.

While a stage is set, the threads, locks, conditions, events and clocks that objkv's modules took
from ``threading`` and ``time`` are the stage's, and so are objkv's alarms. Threads are greenlets:
exactly one runs, until it comes to a point where another may go on (a lock, a wait, a call of a
store, a copy). There the schedule chooses. So an interleaving is a list of choices: it can be
repeated, and changed.

Time is the stage's as well: it stands still while anybody runs, but for what a schedule lets pass,
and jumps to the next deadline when all wait.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import greenlet

from objkv import background
from objkv.agent.memory import arena

TICK_S = 1e-7
STEPS_MAX = 200_000


class Broken(AssertionError):
    """What must not be, was. The schedule's choices repeat it."""


@dataclass(eq=False, repr=False)
class Task:
    number: int
    name: str
    ready: Callable[[], bool] | None = None
    """What it waits for; None: nothing."""
    until: float | None = None
    timed_out: bool = False
    over: bool = False
    gives_way: bool = False
    """Whether others come first this time."""
    lags: int = 0
    """1: it gave way, 2: it was kept from going on. By default it goes on when nobody who lags less
    can."""
    where: str = ""
    glet: Any = None

    def __repr__(self) -> str:
        return f"{self.name}@{self.where}"


class Schedule(Protocol):
    def choose(self, options: Sequence[Task | None], current: Task | None) -> int:
        """Which of ``options``; the first is the default: ``current`` where it can go on. None is
        no thread: the next deadline passes."""


class Stage:
    def __init__(self, schedule: Schedule) -> None:
        self.now = 1000.0
        self.tasks: list[Task] = []
        self.errors: list[str] = []
        self.steps = 0
        self.alarms: dict[Alarm, None] = {}
        """Those that are not closed. Each would be an open file."""
        self.calm = False
        """Whether nothing is to choose for now: what happens is not what is looked at."""
        self.current: Task | None = None
        """Who runs; None outside of ``play``."""
        self._schedule = schedule
        self._hub: Any = None
        self._is_killing = False

    def play(self, main: Callable[[], None]) -> None:
        """Run ``main`` and every thread it starts, until all have ended. Raises ``Broken``."""
        self._hub = greenlet.getcurrent()
        first = self.spawn("engine", main)
        try:
            while any(not task.over for task in self.tasks):
                self._step()
            if self.errors:
                raise Broken("; ".join(self.errors))
        finally:
            assert first.number == 0
            self._kill()

    def spawn(self, name: str, run: Callable[[], None]) -> Task:
        task = Task(len(self.tasks), name)

        def guarded() -> None:
            try:
                run()
            except greenlet.GreenletExit:
                raise
            except BaseException as exc:
                self.errors.append(f"{name} ended with {type(exc).__name__}: {exc}")
                if isinstance(exc, Broken) or task.number == 0:
                    raise
            finally:
                task.over = True

        task.glet = greenlet.greenlet(guarded, parent=self._hub)
        self.tasks.append(task)
        return task

    def pause(self, where: str) -> None:
        if (task := self.current) is not None:
            task.where = where
            self._hub.switch()

    def give_way(self) -> None:
        """Others go on here, by default as far as they can."""
        if (task := self.current) is not None:
            task.lags, task.gives_way = 1, True
        self.pause("gives way")

    def wait(self, where: str, ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until ``ready()``, at most so long; whether it is. Others may go on in any case."""
        task = self.current
        if self._is_killing:
            raise greenlet.GreenletExit
        if task is None:  # before and after the play there is nobody to wait for
            if not ready() and seconds is None:
                raise Broken(f"nobody ends the wait in {where}")
            return ready()
        task.where, task.ready, task.timed_out = where, ready, False
        task.until = None if seconds is None else self.now + max(0.0, seconds)
        self._hub.switch()
        return not task.timed_out or ready()

    def _step(self) -> None:
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise Broken(f"no end after {STEPS_MAX} steps: {self._shown()}")
        self.now += TICK_S
        alive = [task for task in self.tasks if not task.over]
        able = [task for task in alive if self._is_able(task)]
        timed = [task for task in alive if task.ready is not None and task.until is not None]
        if not able:
            if not timed:
                raise Broken(f"all wait for each other: {self._shown()}")
            able, timed = [self._pass_time(timed)], []
        current = self.current
        options: list[Task | None] = []
        if current in able and not (current is not None and current.gives_way):
            options.append(current)
        # Else whoever comes after it: the default is a round, so that nobody starves.
        after = -1 if current is None else current.number
        able.sort(key=lambda t: (t.lags, t.number <= after, t.number))
        options += [task for task in able if task not in options]
        if timed:
            options.append(None)
        chosen = options[0]
        if len(options) > 1 and not self.calm:
            chosen = options[self._schedule.choose(options, current)]
        if current is not None and current is options[0] is not chosen:
            current.lags = 2
        if chosen is None:
            chosen = self._pass_time(timed)
        chosen.lags, chosen.gives_way = 0, False
        self.current = chosen
        chosen.ready = chosen.until = None
        chosen.glet.switch()

    def _is_able(self, task: Task) -> bool:
        if task.ready is None:
            return True
        if task.until is not None and self.now >= task.until:
            task.timed_out = True
            return True
        return task.ready()

    def _pass_time(self, timed: Sequence[Task]) -> Task:
        first = min(timed, key=lambda task: task.until or 0.0)
        self.now = max(self.now, first.until or 0.0)
        first.timed_out = True
        return first

    def _kill(self) -> None:
        self.current, self._is_killing = None, True
        for task in self.tasks:
            if not task.over:
                with suppress(Exception):  # it is broken already
                    task.glet.throw(greenlet.GreenletExit)
        self._is_killing = False

    def _shown(self) -> str:
        return ", ".join(repr(task) for task in self.tasks if not task.over)


_stage: Stage | None = None


def the_stage() -> Stage:
    assert _stage is not None
    return _stage


class Lock:
    """As ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        stage = the_stage()
        if not blocking:
            stage.pause("lock")
        elif not stage.wait("lock", lambda: not self._held, None if timeout < 0 else timeout):
            return False
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        if _stage is not None and _stage.current is not None and not _is_ending():
            _stage.pause("unlocked")

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_ending() -> bool:
    return isinstance(sys.exc_info()[1], greenlet.GreenletExit)


class Condition:
    """As ``threading.Condition``, without spurious ends of waits."""

    def __init__(self, lock: Any = None) -> None:
        self._lock = lock or Lock()
        self._waiting: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return bool(self._lock.__enter__())

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__(*_)

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self._lock._held = False
        stage = the_stage()
        try:
            stage.wait("wait", lambda: told[0], timeout)
            if not told[0]:  # by identity: all that wait look alike
                self._waiting = [one for one in self._waiting if one is not told]
        finally:
            if not _is_ending():
                stage.wait("lock again", lambda: not self._lock._held)
            self._lock._held = True
        return told[0]

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        stage = the_stage()
        end = None if timeout is None else stage.now + timeout
        while not (held := predicate()):
            if end is not None and stage.now >= end:
                return held
            self.wait(None if end is None else end - stage.now)
        return held

    def notify(self, n: int = 1) -> None:
        assert self._lock._held
        for told in self._waiting[:n]:
            told[0] = True
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        the_stage().pause("set")

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return the_stage().wait("event", lambda: self._is_set, timeout)


class Thread:
    """As ``threading.Thread``."""

    def __init__(
        self,
        *,
        target: Callable[..., Any],
        name: str = "thread",
        args: Sequence[Any] = (),
        daemon: bool | None = None,
    ) -> None:
        self._run = lambda: target(*args)
        self.name, self.daemon = name, daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = the_stage().spawn(self.name, self._run)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        task = self._task
        the_stage().wait("join", lambda: task.over, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over


class Alarm:
    """As ``objkv.background.Alarm``, of this process alone."""

    def __init__(self) -> None:
        self.has_rung = False
        self.is_closed = False
        the_stage().alarms[self] = None

    def set(self) -> None:
        if not self.is_closed:
            self.has_rung = True
        the_stage().pause("ring")

    def clear(self) -> None:
        self.has_rung = False

    def close(self) -> None:
        self.is_closed = True
        the_stage().alarms.pop(self, None)
        the_stage().pause("alarm closed")


def _wait_for(alarms: Sequence[Alarm], seconds: float) -> bool:
    if any(one.is_closed for one in alarms):
        raise ValueError("file descriptor cannot be a negative integer (-1)")
    the_stage().wait("alarm", lambda: any(one.has_rung for one in alarms), seconds)
    for one in alarms:
        one.clear()
    return True


def _get_ident() -> int:
    current = the_stage().current
    return 0 if current is None else 1 + current.number


class _PagesAhead:
    """As ``PagesAhead``, without its thread: no copy depends on when pages come."""

    def __init__(self, _arena: arena.Arena) -> None: ...

    def used(self, _end: int) -> None: ...

    def close(self) -> None: ...


_INSTEAD: dict[Any, Any] = {
    arena.PagesAhead: _PagesAhead,
    threading.Lock: Lock,
    threading.RLock: Lock,
    threading.Condition: Condition,
    threading.Event: Event,
    threading.Thread: Thread,
    threading.get_ident: _get_ident,
    background.Alarm: Alarm,
    background.wait_for: _wait_for,
    time.monotonic: lambda: the_stage().now,
    time.thread_time: lambda: 0.0,
    time.sleep: lambda seconds: the_stage().wait("sleep", lambda: False, seconds),
}


@lru_cache(maxsize=1)
def _places(_modules: int) -> list[tuple[dict[str, Any], str, Any]]:
    """Every name in objkv's modules, and every default of a constructor's, that has to change."""
    found: list[tuple[dict[str, Any], str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("objkv.") or module is None:
            continue
        for name, value in list(vars(module).items()):
            if _is_replaced(value):
                found.append((vars(module), name, _INSTEAD[value]))
            elif isinstance(value, type) and value.__module__ == module_name:
                defaults = getattr(value.__init__, "__kwdefaults__", None) or {}
                for key, default in defaults.items():
                    if _is_replaced(default):
                        found.append((defaults, key, _INSTEAD[default]))
    return found


def _is_replaced(value: Any) -> bool:
    try:
        return value in _INSTEAD
    except TypeError:
        return False


@contextmanager
def on_stage(schedule: Schedule) -> Iterator[Stage]:
    """Objkv's modules that are imported now see a new stage instead of threads."""
    global _stage
    assert _stage is None
    places = [(names, key, new, names[key]) for names, key, new in _places(len(sys.modules))]
    _stage = Stage(schedule)
    for names, key, new, _ in places:
        names[key] = new
    try:
        yield _stage
    finally:
        for names, key, _, old in places:
            names[key] = old
        _stage = None
