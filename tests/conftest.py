"""What the whole test run shares."""

import functools
import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from botocore.loaders import JSONFileLoader, Loader

from objkv import redact
from tests import durations
from tests.leaks import Leaks
from tests.support.agents import agent_folder

# Other processes use the same cores; a slow example says nothing about objkv. In CI examples are
# the same in every run: new ones are for whoever changes something, not for the day of a release.
hypothesis.settings.register_profile(
    "objkv",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("objkv")

# Agents outlive what starts them: what a test starts without saying more has one of its own.
os.environ["OBJKV_AGENT"] = "private"

# A shell starts what it puts in the background deaf to SIGINT, and every child inherits that: then
# no test could interrupt a program as a terminal does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_read_json, _list_services = JSONFileLoader._load_file, Loader.list_available_services


@functools.cache
def _json_read_once(*of_file: Any) -> Any:
    return _read_json(JSONFileLoader(), *of_file)


@functools.cache
def _services_listed_once(folders: tuple[str, ...], kind: str) -> Any:
    return _list_services(Loader(list(folders), include_default_search_paths=False), kind)


# For each client, botocore reads the same megabytes of JSON: 0.3 s, and tests open a thousand.
JSONFileLoader._load_file = lambda _self, *of_file: _json_read_once(*of_file)
Loader.list_available_services = lambda self, type_name: _services_listed_once(
    tuple(self.search_paths), type_name
)


@pytest.fixture(autouse=True, scope="session")
def agents_end() -> Iterator[None]:
    """Ends agents that a test left running: they would stay for ten minutes."""
    with agent_folder() as sockets:
        os.environ["XDG_RUNTIME_DIR"] = str(sockets)
        yield


@pytest.fixture(autouse=True)
def secrets_are_forgotten() -> Iterator[None]:
    """The secrets of one test are words of another."""
    yield
    redact.forget_secrets()


@pytest.fixture(autouse=True)
def loggers_are_as_before() -> Iterator[None]:
    """A connector hands its lines to vLLM's handlers, and pytest's are among them: what a later
    test logs would be captured twice."""
    log = logging.getLogger("objkv")
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


TIMEOUTS_S = {"engine": 3_600, "examples": 3_600, "services": 1_800, "smoke": 900}
"""Of folders with tests that start engines, or are the first to wait for a server's start, which
may be tried several times."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM, engines are not tested, but in CI they are."""
    absent = importlib.util.find_spec("vllm") is None and not os.environ.get("CI")
    for item in items:
        tests = Path(__file__).parent
        folder = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        if folder in TIMEOUTS_S:
            item.add_marker(pytest.mark.timeout(TIMEOUTS_S[folder]))
        if absent and folder in ("engine", "smoke"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


def pytest_configure(config: pytest.Config) -> None:
    """Watch what tests take and what they leave."""
    durations.register(config)
    config.pluginmanager.register(Leaks(), "objkv-leaks")
