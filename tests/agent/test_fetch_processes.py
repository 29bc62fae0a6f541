"""An agent that fetches by TLS with processes: how many, and that none outlives it."""

from functools import partial
from pathlib import Path

import pytest

from objkv.agent.client import AgentConnection
from objkv.agent.memory.arena import CellState
from objkv.assembly import fetchers
from objkv.assembly.backends import open_backends
from objkv.assembly.fetchers import open_s3, process_count
from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, LayerSpec, Provenance, encode, read_header
from objkv.config import load_config
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import NullRecorder
from tests.agent.world import ended, opened, wanted_of
from tests.support.agents import AgentProcess
from tests.support.samples import CHUNK, NAMESPACE
from tests.support.servers.certificates import make_certificates
from tests.support.servers.process import has_ended
from tests.support.servers.quick_s3 import QuickS3
from tests.support.waiting import PATIENCE_S, wait_until

LAYER = LayerSpec("l", "BF16", (2, 2, 72, 8192))
"""Larger than a range."""
KEYS = [ChunkKey(NAMESPACE, bytes([number]) * 20, 0) for number in range(6)]
SETTINGS = {
    "bulk_url": "s3://bucket/kv",
    "s3_region": "us-east-1",
    "s3_addressing": "path",
    "s3_access_key_id": "test",
    "s3_secret_access_key": "testsecret",
}


@pytest.mark.slow
def test_all_processes_end_with_a_killed_agent(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")
    constants = {"objkv.assembly.fetchers.process_count": 1}
    with QuickS3(tls=certificates) as server:
        settings = SETTINGS | {
            "index_url": f"sqlite://{tmp_path}/index",
            "s3_endpoint_url": server.url,
            "s3_ca_bundle": str(certificates / "ca.pem"),
            "load_deadline_ms": "60000",
            "agent_memory_bytes": "20MiB",  # of four payloads
        }
        with open_backends(load_config(settings, environ={}), NullRecorder()) as backends:
            for key in KEYS:
                claim, made = Claim(key, bytes(20), 0, CHUNK), Provenance("0" * 64, "w", 1)
                payload = encode(
                    claim, [LAYER], [bytes(LAYER.nbytes)], codec="none", provenance=made
                )
                backends.bulk.put(key.path(), payload)
                entry = ChunkEntry(NAMESPACE, key.prefix_hash, bytes(20), 0, CHUNK)
                record = shard_record(read_header(payload))
                backends.index.publish(entry, {key.field: record}, ttl_s=3_600)
            wanted = wanted_of(backends.index, KEYS)
        with AgentProcess(settings, constants=constants) as agent:
            client = AgentConnection(agent.path, wants_arena=True, call_s=PATIENCE_S)

            def is_used() -> bool:
                for one in wanted:
                    (lease,) = opened(client, [one])
                    assert ended(client, lease).state is CellState.READY
                    client.release([lease.number])
                return agent.metrics()["fetch_process_gets_total"] > 0

            wait_until(is_used)
            pids = agent.fetchers()
            assert pids
            client.close()
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
    usual = {"s3_endpoint_url": "https://127.0.0.1:1"}
    config = load_config(SETTINGS | usual | given, environ={})
    assert process_count(open_s3(config)) == expected
