"""How programs that serve until they are stopped end."""

import signal
import sys
from typing import Any

from objkv.cli.command import end_signals


def test_a_signal_takes_no_lock_which_the_thread_that_it_interrupts_may_hold() -> None:
    called: list[str] = []

    def seen(frame: Any, event: str, function: Any) -> None:
        called.append(function.__name__ if event.startswith("c_") else frame.f_code.co_name)

    before = signal.getsignal(signal.SIGTERM)
    with end_signals() as ended:
        assert not ended.wait(0)
        handler: Any = signal.getsignal(signal.SIGTERM)
        sys.setprofile(seen)
        handler(signal.SIGTERM, None)
        sys.setprofile(None)
        assert set(called) == {"end", "eventfd_write", "setprofile"}
        assert ended.wait()
        assert ended.wait(), "for ever"
    assert signal.getsignal(signal.SIGTERM) is before
