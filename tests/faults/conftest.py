"""The servers of the matrix, and a clock that can be moved."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.auth
import pytest

from objkv.agent import client
from objkv.agent.answering import NodeLookups
from objkv.agent.client import AgentCalls
from objkv.agent.held_back import HeldBackPayloads
from objkv.agent.outbox import AgentSaves
from objkv.assembly import backends
from objkv.cache.chunks import InFlightSaves
from objkv.cache.lookup import OtherShapesIndex
from objkv.index.redis.index import RedisIndex
from objkv.index.sqlite.index import SqliteFile, SqliteIndex
from objkv.net.breaker import Breakers
from objkv.stores.redis import RedisStore
from objkv.stores.s3 import bucket as s3_bucket
from objkv.stores.s3 import client as s3_client
from objkv.transfer.saver import Saver
from tests.faults.places import Clock, Servers, running_servers

_PATIENT_MS = 5_000


@pytest.fixture(scope="module")  # no longer: what it replaces would be so for other tests, too
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Real servers behind proxies that spoil; this process's clients read a clock that can be
    moved, and what they ask SQLite is counted."""
    with (
        running_servers(tmp_path_factory.mktemp("faults")) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        _lead(patch, running.clock)
        patch.setattr(SqliteFile, "read", running.files.counting(SqliteFile.read))
        patch.setattr(client, "open_socket", running.agent_sockets.opening(client.open_socket))
        # A session reads the client's models from files each time, 100 ms of a core.
        session = boto3.session.Session()
        patch.setattr(boto3.session, "Session", lambda **_: session)
        patch.setattr(s3_client, "random", SimpleNamespace(random=lambda: 0.01))
        patch.setattr(backends, "READ_FLOOR_S", 0.5)
        patch.setattr(backends, "CONNECT_FLOOR_S", 0.5)
        yield running


def _lead(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let everything that reads a clock, but for deadlines, read ``clock``."""
    defaults: dict[Callable[..., Any], dict[str, Any]] = {
        cls.__init__: {"clock": clock.wall}
        for cls in (SqliteIndex, RedisIndex, NodeLookups, OtherShapesIndex, RedisStore)
    }
    defaults[SqliteIndex.__init__]["busy_ms"] = _PATIENT_MS
    for paused in (Breakers, InFlightSaves, Saver, AgentCalls, AgentSaves, HeldBackPayloads):
        defaults[paused.__init__] = {"clock": clock.pauses}
    for function, own in defaults.items():
        patch.setattr(function, "__kwdefaults__", function.__kwdefaults__ | own)
    patch.setattr(client, "REACH_MAX_S", 0.2)
    patch.setattr(s3_bucket, "time", clock.wall)
    patch.setattr(botocore.auth, "get_current_datetime", clock.now)
