"""A forked process that kills itself at its n-th step, a step being any call that others can see:
of the file system, of SQLite, of a socket; and once more when that call has returned."""

import os
import pickle
import signal
import socket
import sqlite3
import sys
import threading
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from objkv.ops.programs import die_with_parent

VISIBLE = frozenset(
    {
        *("open", "write", "writev", "fsync", "link", "rename", "replace", "unlink", "remove"),
        *("mkdir", "rmdir", "ftruncate", "truncate"),
        *("execute", "executemany", "commit", "rollback"),
        *("connect", "send", "sendall", "sendmsg", "recv", "recv_into"),
    }
)
ANSWERS = frozenset({"recv", "recv_into"})
OF = (ModuleType, socket.socket, sqlite3.Connection, sqlite3.Cursor)
"""Whose calls they are: strings have a ``replace``, too."""
NEVER = 1 << 60


class Killer:
    """Counts the steps of all threads of this process, and ends it at step ``at``."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._was_answer = False
        self.steps = 0

    def start(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event not in ("c_call", "c_return") or called.__name__ not in VISIBLE:
            return
        if not isinstance(getattr(called, "__self__", None), OF):
            return
        is_answer = called.__name__ in ANSWERS
        if is_answer and self._was_answer:  # the rest of it: the server has done what it does
            return
        self._was_answer = is_answer and event == "c_return"
        self.steps += 1
        if self.steps == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A fork that does ``work``, and is killed at step ``at`` or whenever ``kill`` is called."""

    def __init__(self, work: Callable[[], object], *, at: int = NEVER) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work, at, write)
        os.close(write)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> tuple[str, Any]:
        """``("killed", None)``, ``("error", what)``, or ``("done", (steps, what it returned))``."""
        with open(self._read, "rb") as told:
            text = told.read()
        os.waitpid(self.pid, 0)
        how: tuple[str, Any] = pickle.loads(text) if text else ("killed", None)  # ours
        return how

    def _run(self, work: Callable[[], object], at: int, write: int) -> None:
        die_with_parent()

        def tell(how: str, what: object) -> None:
            os.write(write, pickle.dumps((how, what)))

        killer = Killer(at)
        try:
            killer.start()
            try:
                result = work()
            finally:
                killer.stop()
            tell("done", (killer.steps, result))
        except BaseException as exc:
            tell("error", f"{type(exc).__name__}: {exc}")
        finally:
            os._exit(0)
