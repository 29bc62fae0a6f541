"""An agent that fetches by TLS with processes: what it serves, and what a kill of either leaves."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from objkv.agent.client import AgentConnection
from objkv.agent.fill import PayloadRequest
from objkv.agent.memory.arena import CellState
from objkv.assembly import fetchers
from objkv.assembly.backends import Backends, open_backends
from objkv.assembly.fetchers import open_s3, process_count
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.config import load_config
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.telemetry import NullRecorder
from tests.agent.world import ended, opened, pages_at
from tests.support.agents import AgentProcess
from tests.support.samples import CHUNK, NAMESPACE
from tests.support.servers.certificates import make_certificates
from tests.support.servers.process import has_ended
from tests.support.servers.quick_s3 import QuickS3
from tests.support.waiting import PATIENCE_S, wait_until

CHUNKS, TOGETHER = 6, 2
TOKENS = tuple(range(CHUNKS * CHUNK))
LAYERS = [LayerSpec(f"l.{number}", "BF16", (2, 2, 72, 8192)) for number in range(2)]
CODECS = ["none", "blosc"]
PROCESSES = {"objkv.assembly.fetchers.process_count": 2}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Settings of an agent over a bucket behind TLS. Its arena holds some of the payloads."""
    folder = tmp_path_factory.mktemp("fetch")
    certificates = make_certificates(folder / "tls")
    with QuickS3(tls=certificates) as server:
        yield {
            "bulk_url": "s3://bucket/kv",
            "index_url": f"sqlite://{folder}/index",
            "s3_endpoint_url": server.url,
            "s3_region": "us-east-1",
            "s3_addressing": "path",
            "s3_access_key_id": "test",
            "s3_secret_access_key": "testsecret",
            "s3_ca_bundle": str(certificates / "ca.pem"),
            "load_deadline_ms": "60000",
            "agent_memory_bytes": "48MiB",
        }


@pytest.fixture(scope="module")
def backends(settings: dict[str, str]) -> Iterator[Backends]:
    with open_backends(load_config(settings, environ={}), NullRecorder()) as backends:
        yield backends


def pages(number: int) -> list[bytes]:
    rng = random.Random(number)
    return [rng.randbytes(one.nbytes // 2).ljust(one.nbytes, b"\0") for one in LAYERS]


@pytest.fixture(scope="module")
def wanted(backends: Backends) -> dict[str, list[PayloadRequest]]:
    """Stored payloads by codec. Without compression they are larger than a range."""
    return {codec: list(stored(backends, codec)) for codec in CODECS}


def stored(backends: Backends, codec: str) -> Iterator[PayloadRequest]:
    namespace = f"{CODECS.index(codec):x}" + NAMESPACE[1:]
    hashes = prefix_hashes(namespace, TOKENS, CHUNK)
    for number, prefix_hash in enumerate(hashes):
        parent = hashes[number - 1] if number else root_hash(namespace)
        start, end = number * CHUNK, (number + 1) * CHUNK
        key = ChunkKey(namespace, prefix_hash, 0)
        claim = Claim(key, parent, start, end)
        provenance = Provenance(token_digest(TOKENS[start:end]), "host-1:42", 1_700_000_000)
        payload = encode(claim, LAYERS, pages(number), codec=codec, provenance=provenance)
        backends.bulk.put(key.path(), payload)
        record = shard_record(read_header(payload))
        entry = ChunkEntry(namespace, prefix_hash, parent, start, end)
        backends.index.publish(entry, {key.field: record}, ttl_s=3_600)
        yield PayloadRequest(claim, record)


def load(agent: AgentProcess, wanted: Sequence[PayloadRequest]) -> int:
    """Read all payloads, as many at a time as the arena holds. The bytes of each must be right.
    Returns how many were misses."""
    client = AgentConnection(agent.path, wants_arena=True, call_s=PATIENCE_S)
    misses = 0
    for first in range(0, len(wanted), TOGETHER):
        leases = opened(client, wanted[first : first + TOGETHER])
        for number, lease in enumerate(leases, first):
            progress = ended(client, lease)
            if progress.state is CellState.READY:
                assert pages_at(client.arena.view, progress) == pages(number)
            else:
                misses += 1
        client.release([lease.number for lease in leases])
    client.close()
    return misses


def served_by_processes(agent: AgentProcess, wanted: Sequence[PayloadRequest]) -> None:
    before = agent.metrics()["fetch_process_gets_total"]

    def are_used() -> bool:
        assert load(agent, wanted) == 0
        return agent.metrics()["fetch_process_gets_total"] >= before + TOGETHER

    wait_until(are_used)


def test_processes_fetch_what_an_agent_serves(
    settings: dict[str, str], wanted: dict[str, list[PayloadRequest]]
) -> None:
    with AgentProcess(settings, constants=PROCESSES) as agent:
        assert agent.fetchers() == []
        for codec in CODECS:
            served_by_processes(agent, wanted[codec])
        pids = agent.fetchers()
        assert pids
        agent.end()
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.slow
def test_killed_processes_cost_no_payload_and_all_end_with_a_killed_agent(
    settings: dict[str, str], wanted: dict[str, list[PayloadRequest]]
) -> None:
    rng = random.Random(1)
    with AgentProcess(settings, constants=PROCESSES) as agent:
        served_by_processes(agent, wanted["none"])
        killed = set[int]()
        while len(killed) < 3:
            if alive := [pid for pid in agent.fetchers() if not has_ended(pid)]:
                pid = rng.choice(alive)
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            assert load(agent, wanted["none"]) == 0
        wait_until(lambda: agent.metrics()["fetch_process_losses_total"] >= 3)
        assert agent.metrics()["load_corrupt_total"] == 0
        pids = agent.fetchers()
        agent.kill()
        for pid in pids:
            wait_until(partial(has_ended, pid))


@pytest.mark.parametrize(
    ("given", "cores", "expected"),
    [({}, 64, 4), ({}, 16, 2), ({}, 7, 0), ({"s3_endpoint_url": "http://127.0.0.1:1"}, 64, 0)],
)
def test_processes_are_as_many_as_tls_and_cores_ask_for(
    given: dict[str, str], cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetchers, "host_cores", lambda: cores)
    keys = {"s3_access_key_id": "test", "s3_secret_access_key": "testsecret"}
    usual = {"bulk_url": "s3://bucket/kv", "s3_endpoint_url": "https://127.0.0.1:1"}
    config = load_config(usual | keys | given, environ={})
    assert process_count(open_s3(config)) == expected
