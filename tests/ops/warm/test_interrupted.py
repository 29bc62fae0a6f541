"""An interruption of ``warm`` waits for nobody, whatever is asked at that moment."""

import threading
from concurrent.futures import Future

import pytest

from objkv.index.memory import MemoryIndex
from objkv.ops.backends_view import BackendsView
from objkv.ops.warm.prefill import PrefillError, PrefillReply, PrefillRequest
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.run import WarmLimits
from objkv.ops.warm.warm import Means, warm_by
from objkv.stores.memory import MemoryStore

BOUND_S = 120
"""Against a hang; nothing takes this long."""


class Silent:
    """An asker that answers nothing until it is closed."""

    name, at_once = "silent", 1

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._is_asked = threading.Event()
        self.was_closed: Future[bool] = Future()

    def hold(self) -> None:
        self._is_asked.set()
        self.was_closed.set_result(self._closed.wait(BOUND_S))
        raise PrefillError("down", "given up", after_s=BOUND_S)  # asked again, this would fail

    def interrupt(self) -> None:
        """End the wait for all answers, as Ctrl-C does, once one of them is waited for."""
        self._is_asked.wait(BOUND_S)
        raise KeyboardInterrupt

    def check(self) -> None:
        self.hold()

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        if prompt.name == "first":
            self.interrupt()
        self.hold()
        return []

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        raise AssertionError(ask)

    def close(self) -> None:
        self._closed.set()


class Healthy(Silent):
    """Passes its check."""

    def check(self) -> None:
        """It is there."""


class Interrupting(Silent):
    """Interrupts the check of another one."""

    def __init__(self, other: Silent) -> None:
        super().__init__()
        self.check = other.interrupt  # type: ignore[method-assign]


def warm(bulk: MemoryStore, index: MemoryIndex, *askers: Silent) -> None:
    view = BackendsView(bulk, None, index, False, 3600, 1000, "test")
    prompts = [WarmPrompt(name, text="hello") for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt):
        warm_by(Means(view, {}, None, None), askers, prompts, WarmLimits())


def test_who_is_being_checked_is_given_up(bulk: MemoryStore, index: MemoryIndex) -> None:
    silent = Silent()
    warm(bulk, index, Interrupting(silent), silent)
    assert silent.was_closed.result(2 * BOUND_S)


def test_who_is_tokenizing_is_given_up(bulk: MemoryStore, index: MemoryIndex) -> None:
    silent = Healthy()
    warm(bulk, index, silent)
    assert silent.was_closed.result(2 * BOUND_S)
