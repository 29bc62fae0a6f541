"""The thread that schedules and computes makes no network call, whatever is loaded or saved."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.toy import STORED_TOKENS, ShakenEngine, prompt
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import valkey_server

CALLS = (
    *("connect", "connect_ex", "send", "sendall", "sendto", "sendmsg"),
    *("recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into"),
)


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that call a socket, once a call."""
    names: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        real = getattr(socket.socket, name)

        def call(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
            names.append(threading.current_thread().name)
            return real(self, *args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(socket.socket, name, recorded(name))
    return names


@pytest.mark.parametrize(("mode", "hot_bytes"), [("async", 1 << 20), ("layerwise", 0)])
def test_the_forward_thread_makes_no_network_call(
    mode: str, hot_bytes: int, callers: list[str], tmp_path: Path
) -> None:
    settings = {"load_mode": mode, "step_load_deadline_ms": 120_000}
    settings |= {"bulk_url": "s3://bucket/prefix", "s3_addressing": "path"}
    settings |= {"s3_access_key_id": "a", "s3_secret_access_key": "b"}
    with QuickS3() as s3, valkey_server(tmp_path / "valkey") as valkey:
        settings |= {"s3_endpoint_url": s3.url, "index_url": valkey.url}
        for loaded, thread in ((0, "objkv-save"), (STORED_TOKENS, "objkv-fill")):
            with ShakenEngine(tmp_path, hot_save_bytes_max=hot_bytes, **settings) as engine:
                callers.clear()
                assert engine.answer(prompt(1)).loaded == loaded
                engine.save_all()
                assert threading.current_thread().name not in callers
                assert any(name.startswith(thread) for name in callers)
                hot_hits = engine.agent.recorder.value("hot_hits")
                assert (hot_hits > 0) is bool(loaded and hot_bytes)
