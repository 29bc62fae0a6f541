"""A request that says so has its chunks put, also those that its node's agent holds back."""

from pathlib import Path

import pytest

from objkv.ops.warm.endpoint import TRANSFER_PARAMS
from tests.connector.kv.hybrid_engine import Engine
from tests.connector.kv.hybrid_layout import Layout
from tests.faults.toy import LAYOUT, STORED_TOKENS, prompt
from tests.support.agents import AgentProcess
from tests.support.waiting import wait_until


def test_nothing_is_held_back_of_a_request_that_says_so(tmp_path: Path) -> None:
    urls = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    own = {"save_to_bucket": "reused", "agent_memory_bytes": str(1 << 20)}

    def stored() -> int:
        return len(list((tmp_path / "c").rglob("*.safetensors")))

    with (
        AgentProcess(urls | own) as agent,
        Engine(LAYOUT, tmp_path, agent=agent.url, admission="always", **urls) as engine,
    ):
        engine.run([prompt(1), prompt(2)])
        engine.save_all()
        assert stored() == 0
        (answer,) = engine.run([prompt(1)], **TRANSFER_PARAMS)
        assert (answer.local, answer.loaded) == (STORED_TOKENS, 0), "nothing is read"
        wait_until(lambda: stored() == 3)
        engine.forget()
        (answer,) = engine.run([prompt(2)], **TRANSFER_PARAMS)
        assert answer.loaded == STORED_TOKENS
        wait_until(lambda: stored() == 6)
        engine.run([prompt(3)], **TRANSFER_PARAMS)
        wait_until(lambda: stored() == 9)


@pytest.mark.parametrize(
    ("kinds", "payloads"),
    [((("full", 0), ("sliding_window", 5)), 6), ((("sliding_window", 5),), 3)],
    ids=["full and window", "window alone"],
)
def test_what_vllm_has_no_blocks_of_is_put_from_the_agents_memory(
    kinds: tuple[tuple[str, int], ...], payloads: int, tmp_path: Path
) -> None:
    """Such as chunks before a window: they cannot be saved once more."""
    layout = Layout(kinds, (4,) * len(kinds), chunk_tokens=8)
    urls = {"bulk_url": f"file://{tmp_path}/c", "index_url": f"sqlite://{tmp_path}/i"}
    own = {"save_to_bucket": "reused", "agent_memory_bytes": str(1 << 20)}

    def stored() -> int:
        return len(list((tmp_path / "c").rglob("*.safetensors")))

    with (
        AgentProcess(urls | own) as agent,
        Engine(layout, tmp_path, agent=agent.url, admission="always", **urls) as engine,
    ):
        engine.run([prompt(1)])
        engine.save_all()
        assert stored() == 0
        (answer,) = engine.run([prompt(1)], **TRANSFER_PARAMS)
        assert (answer.local, answer.loaded) == (STORED_TOKENS, 0), "nothing is read"
        wait_until(lambda: stored() == payloads)
