"""What a test file leaves open, descriptors, threads and shared memory, is an error of its last
test: a process that runs thousands of tests has no room for what each of them forgot. So is memory
that a process still has after its last test."""

import ctypes
import gc
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import nursery
from tests.support.servers import ports

PATIENCE_S = 60.0
MEMORY_MAX = 3 << 29
KEPT = re.compile("/mpl-data/fonts/|^thread tqdm_monitor$|^mapping of /dev/shm/sem[.]")
"""What belongs to the process once it is there: fonts that matplotlib has read, tqdm's thread and
its lock, which is a semaphore between processes."""


def held() -> Counter[str]:
    """What this process has open."""
    names: list[str] = []
    kept = nursery.KEPT | {mark.fileno() for mark in ports.RESERVED}
    for number in {*os.listdir("/proc/self/fd")} - {*map(str, kept)}:
        with suppress(FileNotFoundError):  # that of the folder itself
            names.append(f"descriptor of {os.readlink(f'/proc/self/fd/{number}')}")
    names += [f"thread {thread.name}" for thread in threading.enumerate()]
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:  # noqa: S108
            names.append(f"mapping of {line.split(maxsplit=5)[5]}")
    return Counter(name for name in names if not KEPT.search(name))


def trim() -> None:
    """Give back what glibc keeps of freed memory."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes that this process has in memory, without those of libraries, which all share."""
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M))
    return (int(status["RssAnon"]) + int(status["RssShmem"])) << 10


class Leaks:
    """Compares what is open at the beginning and the end of each file."""

    def __init__(self) -> None:
        self._before = held()
        self._file: Path | None = None
        self._failed = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """The first test of a file begins."""
        if self._file != item.path:
            self._file, self._before = item.path, held()
            self._failed = item.session.testsfailed
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """What a fixture of several files opens is closed later."""
        before = held() if fixturedef.scope in ("session", "package") else None
        result = yield
        if before is not None:
            self._before += held() - before
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None]:
        """The last test of a file, whose fixtures are gone now, tells what is left."""
        result = yield
        if nextitem is None or nextitem.path != item.path:
            getattr(item, "funcargs", {}).clear()  # pytest does so only later
            left, until = held() - self._before, time.monotonic() + PATIENCE_S
            if item.session.testsfailed > self._failed:
                return result  # what a failed test leaves open is no other error
            while left and time.monotonic() < until:
                gc.collect()
                time.sleep(0.02)
                left = held() - self._before
            if left:
                lines = "\n".join(f"  {count} {name}" for name, count in sorted(left.items()))
                pytest.fail(f"{item.path.name} leaves open:\n{lines}", pytrace=False)
            if resident() > MEMORY_MAX // 2:
                gc.collect()  # which is off while orders of threads are tried
                trim()
        if nextitem is None and (bytes_ := resident()) > MEMORY_MAX:
            pytest.fail(f"this process still has {bytes_ >> 20} MiB of memory", pytrace=False)
        return result
