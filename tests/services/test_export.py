"""``objkv import`` and ``export`` on real servers: into Ceph's S3 and Valkey, and out again."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.index.shapes import SHAPES_HASH
from objkv.telemetry import NullRecorder
from tests.cli.conftest import Machine, Run, home, machine, run
from tests.support.samples import CHUNK, NAMESPACE, TOKENS
from tests.support.servers.ceph import S3Server
from tests.support.servers.fixtures import use_servers
from tests.support.servers.redis import RedisServer

__all__ = ["home", "machine", "run"]

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


def sums(folder: Path) -> dict[str, str]:
    _, *lines = [json.loads(line) for line in (folder / "manifest.jsonl").open()]
    return {line["key"]: line["sha256"] for line in lines}


def test_what_goes_into_real_servers_comes_out_byte_for_byte(
    run: Run,
    machine: Machine,
    tmp_path: Path,
    s3_server: S3Server,
    s3_prefixes: Iterator[str],
    own_valkey: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine.fill()
    first, second = tmp_path / "first", tmp_path / "second"
    assert run("export", "--out", str(first), "--namespace", NAMESPACE).code == 0
    use_servers(monkeypatch, s3_server, next(s3_prefixes), own_valkey)
    brought = run("import", str(first), "--apply", "--json").document
    assert (brought["added"], brought["refused"], brought["busy"]) == (6, 0, 0)
    again = run("import", str(first), "--apply", "--json").document
    assert (again["added"], again["present"]) == (0, 6)
    with open_backends(load_config({}), NullRecorder()) as ends:
        [shapes] = ends.index.lookup(NAMESPACE, [SHAPES_HASH])
        assert shapes is not None
        assert len(shapes.shards) == 2
        [usage] = ends.index.usage()
        assert usage.payloads == 6
    stdin = " ".join(map(str, TOKENS))
    told = run("match", "--explain", "--json", stdin=stdin).document
    assert (told["usable_tokens"], told["explanation"]["cause"]) == (3 * CHUNK, "nothing")
    assert run("export", "--out", str(second), "--namespace", NAMESPACE).code == 0
    assert sums(second) == sums(first)
    assert len(sums(first)) == 6
