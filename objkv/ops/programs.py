"""Child programs: each runs in its own process group, which ends with the context manager."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, cast

from objkv.errors import ObjkvError

_TAIL_LINES = 25
_PR_SET_PDEATHSIG = 1
# A child needs no network, reports no usage, listens on loopback only, and leaves no node agent.
_ENVIRONMENT = {
    "OBJKV_AGENT": "private",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def die_with_parent() -> None:
    """For ``preexec_fn``: kill the child when the thread that started it ends for any reason.
    Otherwise a killed parent would leave its children running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ProgramFailed(ObjkvError):
    """A child program failed; its log shows the reason."""

    def __init__(self, what: str, log_file: Path) -> None:
        self.what = what
        self.log_file = log_file
        super().__init__(f"{what}; its log is {log_file}")

    def tail(self) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


class Program:
    """A running Python program. The context manager kills it at the end of the block."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_file: Path,
        settings: Mapping[str, str],
        *,
        speaks: bool = True,
    ) -> None:
        """``settings`` replace all ``OBJKV_`` variables of the environment: a child must not use
        the user's store. Its output goes to ``log_file``, but with ``speaks`` ``lines`` reads its
        standard output."""
        self.name = name
        self.log_file = log_file
        own = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *arguments],  # -P: no imports from the working directory
                env={**own, **_ENVIRONMENT, **settings},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if speaks else log,
                stderr=log,
                start_new_session=True,
                # An interrupt may arrive before the block that would kill the child is entered.
                preexec_fn=die_with_parent,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def lines(self, *, bound_s: float) -> Iterator[str]:
        """Yield output lines until the end. Raises ``ProgramFailed``, also after ``bound_s``."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(bound_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield from cast("IO[str]", self._process.stdout)
            status = self._process.wait()  # it may close its output long before it ends
        finally:
            timer.cancel()
        if late.is_set():
            raise self.failed(f"did not finish within {bound_s:.0f} s")
        if status:
            raise self.failed(f"ended with exit status {status}")

    def check(self) -> None:
        """Raise ``ProgramFailed`` if the program has ended."""
        if (status := self._process.poll()) is not None:
            raise self.failed(f"ended with exit status {status}")

    def failed(self, what: str) -> ProgramFailed:
        """Return the error that describes the failure ``what``."""
        return ProgramFailed(f"{self.name} {what}", self.log_file)

    def end(self, *, bound_s: float) -> None:
        """Ask it to end, and wait for it. Raises ``ProgramFailed``, also after ``bound_s``."""
        self._process.terminate()
        try:
            status = self._process.wait(bound_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self.failed(f"did not end within {bound_s:.0f} s") from None
        if status:
            raise self.failed(f"ended with exit status {status}")

    def kill(self) -> None:
        """Kill the program and its children. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
