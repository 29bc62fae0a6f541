"""A line now and then of how far a long run is: how many tests are done, and which files run.

pytest's dots say nothing for minutes while engines start. Only the process that prints has this.
"""

import threading
import time
from typing import Any

import pytest

EVERY_S = 30.0


class Progress:
    """Counts tests as they begin and end, here or in the processes of xdist."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter
        self._began = self._told = time.monotonic()
        self._total = self._done = 0
        self._running: dict[str, None] = {}
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist, all tests are known here."""
        self._total = self._total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """With xdist, each of its processes has found the same tests; nothing is printed here but
        by this class while they run, so that a thread may print."""
        if not self._total:
            threading.Thread(target=self._tell_regularly, name="progress", daemon=True).start()
        self._total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._running[nodeid] = None
        self._tell_if_due()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._running.pop(nodeid, None)
        self._done += 1

    def pytest_sessionfinish(self) -> None:
        """What follows is pytest's own summary."""
        self._ended.set()

    def line(self, now: float) -> str:
        """How far it is."""
        files = dict.fromkeys(nodeid.partition("::")[0] for nodeid in list(self._running))
        minutes, seconds = divmod(int(now - self._began), 60)
        share = 100 * self._done // max(self._total, 1)
        return (
            f"{minutes:3d}:{seconds:02d} {self._done:,} of {self._total:,} tests ({share} %), "
            f"running {' '.join(files)}"
        )

    def _tell_regularly(self) -> None:
        while not self._ended.wait(1):
            self._tell_if_due()

    def _tell_if_due(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._running and now - self._told >= EVERY_S:
                self._told = now
                begun = self._reporter.config.get_terminal_writer().width_of_current_line
                self._reporter.write_line("\n" * bool(begun) + self.line(now))


def register(config: pytest.Config) -> None:
    """Show progress where pytest prints dots: ``-v`` names every test already."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(config, "workerinput")
    if reporter and not is_worker and config.get_verbosity() <= 0 and not config.option.collectonly:
        config.pluginmanager.register(Progress(reporter), "objkv-progress")
