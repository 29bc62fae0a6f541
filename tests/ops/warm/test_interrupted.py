"""An interruption of ``warm`` waits for nobody, whatever is asked at that moment."""

import _thread
import threading
from concurrent.futures import Future

import pytest

from objkv.index.memory import MemoryIndex
from objkv.ops.ends import Ends
from objkv.ops.warm.asking import Ask, AskError, Reply
from objkv.ops.warm.prompts import Prompt
from objkv.ops.warm.run import Patience
from objkv.ops.warm.story import Means, warm_by
from objkv.stores.memory import MemoryStore

BOUND_S = 20
"""Against a hang; nothing takes this long."""


class Silent:
    """An asker that interrupts the main thread when it is asked, and then does not answer until it
    is closed."""

    name, at_once = "silent", 1

    def __init__(self, where: str) -> None:
        self._where = where
        self._closed = threading.Event()
        self.asked = 0
        self.was_closed: Future[bool] = Future()

    def _hold(self) -> None:
        self.asked += 1
        if self.asked == 1:
            _thread.interrupt_main()
        self.was_closed.set_result(self._closed.wait(BOUND_S))
        raise AskError("down", "given up", after_s=BOUND_S)

    def check(self) -> None:
        if self._where == "check":
            self._hold()

    def tokenize(self, prompt: Prompt) -> list[int]:
        self._hold()
        return []

    def ask(self, ask: Ask) -> Reply:
        raise AssertionError(ask)

    def close(self) -> None:
        self._closed.set()


@pytest.mark.parametrize("where", ["check", "tokenize"])
def test_what_is_asked_before_the_work_is_given_up(
    bulk: MemoryStore, index: MemoryIndex, where: str
) -> None:
    asker = Silent(where)
    ends = Ends(bulk, None, index, False, 3600, 1000, "test")
    with pytest.raises(KeyboardInterrupt):
        warm_by(Means(ends, {}, None, None), [asker], [Prompt("p", text="hello")], Patience())
    assert asker.was_closed.result(2 * BOUND_S)
    assert asker.asked == 1  # and nobody asks again, or pauses before that
