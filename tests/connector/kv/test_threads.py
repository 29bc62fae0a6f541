"""The threads that an engine's process has of the connector."""

import threading
from pathlib import Path

import pytest

from tests.connector.kv.hybrid_engine import Engine
from tests.faults.toy import LAYOUT, STORED_TOKENS, prompt
from tests.support.agents import AgentProcess

pytestmark = pytest.mark.slow


def test_one_thread_loads_two_save_and_one_looks_up(tmp_path: Path) -> None:
    urls = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    before = set(threading.enumerate())
    with (
        AgentProcess(urls | {"agent_memory_bytes": str(1 << 20)}) as agent,
        Engine(LAYOUT, tmp_path, agent=agent.url, admission="always", **urls) as engine,
    ):
        engine.run([prompt(1), prompt(2)])
        engine.save_all()
        engine.forget()
        answers = engine.run([prompt(1), prompt(2)])
        assert [answer.loaded for answer in answers] == [STORED_TOKENS] * 2
        names = sorted(one.name for one in set(threading.enumerate()) - before)
        ours = [name for name in names if name.startswith("objkv-") and "register" not in name]
        assert len(ours) <= 4, ours
        assert "objkv-lookup" in ours
