"""A request that says so has its chunks put, also those that its node's agent holds back."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from objkv.ops.warm.endpoint import TRANSFER_PARAMS
from tests.connector.kv.hybrid_engine import Engine
from tests.connector.kv.hybrid_layout import Layout
from tests.faults.toy import LAYOUT, STORED_TOKENS, ShakenEngine, prompt
from tests.support.agents import AgentProcess
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import valkey_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@contextmanager
def served(folder: Path, layout: Layout = LAYOUT) -> Iterator[Engine]:
    """An engine, and its node's agent in a process of its own, which holds back what it saves."""
    urls = {"bulk_url": f"file://{folder}/c", "index_url": f"sqlite://{folder}/i"}
    own = {"save_to_bucket": "reused", "agent_memory_bytes": str(1 << 20)}
    with (
        AgentProcess(urls | own) as agent,
        Engine(layout, folder, agent=agent.url, admission="always", **urls) as engine,
    ):
        yield engine


def stored(folder: Path) -> int:
    return len(list((folder / "c").rglob("*.safetensors")))


@pytest.mark.parametrize(
    ("kinds", "payloads"),
    [((("full", 0), ("sliding_window", 5)), 6), ((("sliding_window", 5),), 3)],
    ids=["full and window", "window alone"],
)
def test_what_vllm_has_no_blocks_of_is_put_from_the_agents_memory(
    kinds: tuple[tuple[str, int], ...], payloads: int, tmp_path: Path
) -> None:
    """Such as chunks before a window: they cannot be saved once more."""
    with served(tmp_path, Layout(kinds, (4,) * len(kinds), chunk_tokens=8)) as engine:
        engine.run([prompt(1)])
        engine.save_all()
        assert stored(tmp_path) == 0
        (answer,) = engine.run([prompt(1)], **TRANSFER_PARAMS)
        assert (answer.local, answer.loaded) == (STORED_TOKENS, 0), "nothing is read"
        wait_until(lambda: stored(tmp_path) == payloads)
        engine.run([prompt(2)], **TRANSFER_PARAMS)
        wait_until(lambda: stored(tmp_path) == 2 * payloads)


# The thread that schedules and computes makes no network call, whatever is loaded or saved.


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
