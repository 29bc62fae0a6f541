"""The users of the index as Terraform makes them, on a real Valkey: each role does its work, and
who gives no name does nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import Config, Role, load_config
from objkv.errors import StoreDenied
from objkv.ops.doctor.access import ROLES
from objkv.telemetry import MemoryRecorder, NullRecorder
from scripts.write_rights import FILE
from tests.services.access_roles import WORK, save
from tests.support.servers.fixtures import PATIENT
from tests.support.servers.redis import RedisServer, valkey_server

pytestmark = pytest.mark.service

PASSWORD = "0123456789abcdef"
MODULE = FILE.parents[1] / "index" / "main.tf"


def told(server: RedisServer, **settings: str) -> Config:
    place = {"bulk_url": f"file://{server.folder}/bulk", "index_url": f"{server.url}/0"}
    return load_config(place | PATIENT | settings, environ={})


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> Role:
    found: Role = request.param
    return found


@pytest.fixture
def server(tmp_path: Path, role: Role) -> Iterator[RedisServer]:
    """With what an administrator saved, unless a writer is to; then as ElastiCache has users."""
    with valkey_server(tmp_path) as server:
        if role != "writer":
            recorder = MemoryRecorder()
            with open_backends(told(server), recorder) as ends:
                save(ends, recorder, "admin")
        rights = json.loads(FILE.read_text())["access_strings"]
        (nobody,) = re.findall(r'"default"\n.*?access_string = "([^"]+)"', MODULE.read_text(), re.S)
        for name, access_string in {
            **{f"objkv-{one}": rights[one]["single"] for one in ROLES},
            "default": nobody,
        }.items():
            words = access_string.replace("${redis_prefix}", "objkv").split()
            server.client().execute_command("ACL", "SETUSER", name, "reset", f">{PASSWORD}", *words)
        yield server


def test_each_role_does_its_work_as_its_user(server: RedisServer, role: Role) -> None:
    config = told(server, role=role, redis_username=f"objkv-{role}", redis_password=PASSWORD)
    WORK[role](config)


@pytest.mark.parametrize("role", ["writer"], indirect=True)
@pytest.mark.parametrize("login", [{}, {"redis_password": PASSWORD}])
def test_who_gives_no_name_is_refused(server: RedisServer, login: dict[str, str]) -> None:
    with open_backends(told(server, **login), NullRecorder()) as ends, pytest.raises(StoreDenied):
        ends.index.check()
