"""``objkv prefetch``, and what ``objkv match`` says with an agent."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from objkv.agent.prefetch import Matched, Prefetched
from objkv.assembly.agent import NodeAgent
from objkv.cli import prefetch as module
from objkv.config import load_config
from objkv.ops.agent_api import AgentApi, AskedPrompt
from objkv.telemetry import MemoryRecorder
from tests.cli.conftest import Machine, Run, refused
from tests.support.agents import agent_folder
from tests.support.samples import IDENTITY, NAMESPACE, TOKENS, save_identity

PROMPT = json.dumps(list(TOKENS))
NOBODY = "/dev/null/none"


@pytest.fixture
def agent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    machine.fill()
    config = load_config({"agent_memory_bytes": 1 << 20})
    with agent_folder() as folder, NodeAgent(config, folder / "s", MemoryRecorder()) as running:
        monkeypatch.setenv("OBJKV_AGENT", f"unix://{folder}/s")
        yield running


def test_a_prompt_is_in_memory_when_the_command_ends(run: Run, agent: NodeAgent) -> None:
    ran = run("prefetch", stdin=PROMPT)
    assert ran.code == 0
    assert "3 of 3 chunks have a record: 6 payloads to fetch" in ran.out
    assert "6 payloads in memory" in ran.out
    assert len(agent.core.arena_cache) == 6
    again = run("prefetch", "--json", stdin=PROMPT).document
    assert (again["started"], again["resident"], again["arrived"]) == (0, 6, 6)
    found = run("match", stdin=PROMPT)
    assert "6 of 6 payloads are in this node's memory" in found.out
    assert run("match", "--json", stdin=PROMPT).document["memory"]["resident"] == 3


@pytest.mark.parametrize(
    "name", [NAMESPACE, NAMESPACE[:6], IDENTITY.model, f"{IDENTITY.tenant}/ti"]
)
def test_a_namespace_has_the_names_that_it_has_elsewhere(
    run: Run, agent: NodeAgent, name: str
) -> None:
    ran = run("prefetch", "-n", name, "--no-wait", "--json", stdin=PROMPT)
    assert (ran.code, ran.document["started"]) == (0, 6)
    refused(run("prefetch", "-n", "none", stdin=PROMPT), "no namespace matches none")


def test_a_salt_is_part_of_the_prompt_and_what_is_not_stored_is_said(
    run: Run, agent: NodeAgent
) -> None:
    ran = run("prefetch", "--cache-salt", "x", stdin=PROMPT)
    assert (ran.code, "no chunk of this prompt is stored" in ran.out) == (1, True)
    ran = run("prefetch", stdin="1 2 3")
    assert (ran.code, "shorter than a chunk: 3 tokens" in ran.out) == (1, True)


def test_what_is_refused_or_lost_is_said(run: Run, machine: Machine, agent: NodeAgent) -> None:
    refusing = Prefetched(3, 3, 0, 0, 6, 0, 0, 6 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentApi, "prefetch", lambda *_: refusing)
        ran = run("prefetch", "--no-wait", stdin=PROMPT)
    assert (ran.code, "6 payloads were refused, 6.0 MiB" in ran.out) == (1, True)
    for entry in list(machine.bulk.scan(f"{NAMESPACE}/")):
        if "identity" not in entry.key:
            machine.bulk.put(entry.key, b"wrong")
    ran = run("prefetch", stdin=PROMPT)
    assert (ran.code, "have not arrived" in ran.out) == (1, True)


def test_without_an_agent_the_command_says_so(
    run: Run, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_identity(machine.bulk)
    refused(run("prefetch", stdin=PROMPT), "no agent: give --socket PATH, or set OBJKV_AGENT")
    ran = run("prefetch", "--socket", NOBODY, stdin=PROMPT)
    refused(ran, f"no agent answers at {NOBODY} (", code=3)
    monkeypatch.setenv("OBJKV_AGENT", f"unix://{NOBODY}")
    machine.fill()
    found = run("match", "--json", stdin=PROMPT)
    assert (found.code, "memory" in found.document) == (0, False)


class Slow(AgentApi):
    """An agent whose payloads arrive one by one, or never."""

    def __init__(self, arriving: int) -> None:
        super().__init__(Path("/none"))
        self.left = arriving

    def prefetch(self, prompt: AskedPrompt, deadline_s: float) -> Prefetched:
        return Prefetched(3, 3, 3, 0, 0, 3 << 20, 0, 0)

    def match(self, prompt: AskedPrompt) -> Matched:
        self.left -= 1
        here = 3 - max(0, self.left)
        return Matched(3, 3, here, 48, 3, 3 << 20, here, here << 20, 3 - here)


def waited(arriving: int, deadline_s: float = 60.0) -> tuple[Any, list[int], float]:
    now, seen = 0.0, list[int]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    report = module.fetch(
        Slow(arriving),
        AskedPrompt(NAMESPACE, TOKENS),
        deadline_s,
        wait=True,
        on_progress=lambda done, total: seen.append(done),
        clock=lambda: now,
        sleep=sleep,
    )
    return report, seen, now


def test_the_command_waits_for_the_last_payload_and_not_for_ever() -> None:
    report, seen, _ = waited(3)
    assert seen == [1, 2, 3]
    assert (report.arrived, report.arrived_bytes) == (3, 3 << 20)
    report, _, now = waited(10**9, deadline_s=3.0)
    assert 3.0 < now < 9.0
    assert report.arrived < 3


def test_ctrl_c_leaves_the_rest_to_the_agent(
    run: Run, agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "fetch", interrupted)
    ran = run("prefetch", stdin=PROMPT)
    assert (ran.code, ran.out) == (130, "")
    assert "the agent continues" in ran.err
