"""``objkv verify``, ``sweep`` and ``rebuild`` on real servers: Valkey, and Ceph's S3."""

from collections.abc import Iterator

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.telemetry import NullRecorder
from tests.cli.conftest import Run, home, run
from tests.support.servers.ceph import S3Server
from tests.support.servers.fixtures import use_servers
from tests.support.servers.redis import RedisServer
from tests.support.upkeep import (
    check_that_a_wiped_index_is_restored,
    check_that_all_is_found_and_mended,
)

__all__ = ["home", "run"]

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]


def test_all_defects_are_found_and_mended_on_real_servers(
    run: Run,
    s3_server: S3Server,
    s3_prefixes: Iterator[str],
    own_valkey: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_servers(monkeypatch, s3_server, next(s3_prefixes), own_valkey)
    with open_backends(load_config({}), NullRecorder()) as ends:
        check_that_all_is_found_and_mended(run, ends)
        check_that_a_wiped_index_is_restored(run, ends)
