"""A real S3 server, Ceph's: what moto cannot show of the store, the rights of each role in the
bucket, and every command with the rights of every role, on it and on a real Valkey."""

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from objkv.assembly.backends import Backends, open_backends
from objkv.cli.app import app
from objkv.config import Config, Role
from objkv.errors import StoreDenied
from objkv.ops.doctor.access import COMMAND_ROLES, ROLES, access_of
from objkv.stores.s3.client import S3Access, open_s3_access
from objkv.stores.s3.store import S3Store
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.cli.conftest import home
from tests.contracts.store_contract import StoreContract
from tests.services.access_roles import KEY, NAMESPACE, PAYLOAD, WORK
from tests.services.access_roles import save as save_chunk
from tests.support.samples import NAMESPACE as FLEETS
from tests.support.samples import TOKENS, save, save_identity
from tests.support.servers.ceph import CephUsers, S3Server
from tests.support.servers.fixtures import BUCKET, s3_config
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.servers.s3_stores import store_of

__all__ = ["home"]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ceph")]

PATH = KEY.path()
PASSWORD = "hunter2"


class TestS3StoreOnCeph(StoreContract):
    """This server checks signatures, also those of a prefix with characters that are escaped."""

    @pytest.fixture
    def store(self, s3_server: S3Server, s3_prefixes: Any) -> Iterator[S3Store]:
        prefix = f"{next(s3_prefixes)}/a b+c%/ü&=?"
        access = open_s3_access(s3_config(s3_server))
        ranges = {"range_bytes": 3 << 20, "ranges_max": 4}
        store = store_of(access, bucket=BUCKET, prefix=prefix, **ranges)
        yield store
        store.close()


class Fleet:
    def __init__(self, s3: S3Server, redis: RedisServer) -> None:
        self._s3 = s3
        place = {"bulk_url": f"s3://{BUCKET}/commands", "index_url": redis.url}
        users, self._admin = CephUsers(s3), redis.client()
        self.accesses: dict[Role | None, S3Access] = {}
        self.settings: dict[Role, dict[str, str]] = {}
        for role in ROLES:
            found = access_of(self.config(**place), role, tenant="a")
            assert found.iam is not None
            assert found.acl is not None
            # Unique, because all modules of a test process share one radosgw.
            name = f"commands-{role}-{secrets.token_hex(4)}"
            access_key, secret_key = users.add(name, found.iam)
            words = found.acl.replace(">PASSWORD", f">{PASSWORD}").split()
            self._admin.execute_command("ACL", "SETUSER", *words[1:])
            self.settings[role] = {
                **found.settings,
                "index_url": redis.url,
                "redis_password": PASSWORD,
                "s3_access_key_id": access_key,
                "s3_secret_access_key": secret_key,
            }

    def config(self, **changes: Any) -> Config:
        return s3_config(self._s3, lookup_deadline_ms=20_000, **changes)

    def everything(self) -> Backends:
        mine = self.settings["writer"]
        names = ("bulk_url", "index_url", "redis_prefix")
        return open_backends(self.config(**{name: mine[name] for name in names}), NullRecorder())

    def environment(self, role: Role) -> dict[str, str]:
        config = self.config(**self.settings[role])
        names = ("s3_endpoint_url", "s3_addressing", "load_deadline_ms", "lookup_deadline_ms")
        given = {name: str(getattr(config, name)) for name in names} | self.settings[role]
        return {f"OBJKV_{name.upper()}": value for name, value in given.items()}

    def access(self, role: Role | None) -> S3Access:
        """To S3, with the rights of ``role`` of tenant ``a``; None for all."""
        if role not in self.accesses:
            rights = {} if role is None else self.settings[role]
            self.accesses[role] = open_s3_access(self.config(**rights))
        return self.accesses[role]

    def place(self, role: Role | None, tenant: str = "a") -> S3Store:
        """The store alone, so that the server's own reply is visible. ``tenant`` owns it."""
        access, prefix = self.access(role), f"commands/{tenant}"
        return store_of(access, bucket=BUCKET, prefix=prefix)

    def empty(self, tenant: str = "a") -> None:
        self._admin.flushall()
        store = self.place(None, tenant)
        for entry in store.scan(""):
            store.delete(entry.key)

    def fill(self, tenant: str = "a") -> None:
        self.empty(tenant)
        if tenant == "a":
            with self.everything() as ends:
                save_chunk(ends, MemoryRecorder(), "admin")
        else:
            self.place(None, tenant).put(PATH, PAYLOAD)


@pytest.fixture(scope="module")
def fleet(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as redis:
        fleet = Fleet(s3_server, redis)
        yield fleet
        for access in fleet.accesses.values():
            access.close()


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_its_work_with_the_policy_that_is_printed(fleet: Fleet, role: Role) -> None:
    fleet.empty() if role == "writer" else fleet.fill()
    WORK[role](fleet.config(**fleet.settings[role]))


def test_who_may_get_but_not_list_is_refused_what_is_missing(
    s3_server: S3Server, fleet: Fleet
) -> None:
    """S3 answers 403 then, as after rights were revoked."""
    places = [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]
    allowed = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": places}
    policy = {"Version": "2012-10-17", "Statement": [allowed]}
    names = ("s3_access_key_id", "s3_secret_access_key")
    keys = dict(zip(names, CephUsers(s3_server).add("unlisted", policy), strict=True))
    fleet.access(None).client.put_object(Bucket=BUCKET, Key="unlisted/there", Body=b"abcd")
    store = store_of(open_s3_access(s3_config(s3_server, **keys)), bucket=BUCKET, prefix="unlisted")
    for call in (
        lambda key: store.get(key),
        lambda key: store.get(key, 0, 4),
        lambda key: store.head(key),
    ):
        assert call("there") is not None
        with pytest.raises(StoreDenied, match="lack a permission"):
            call("missing")
    store.close()


def refused(store: S3Store, *calls: Callable[[S3Store], object]) -> None:
    for call in calls:
        with pytest.raises(StoreDenied, match="lack a permission"):
            call(store)


LARGE = bytes(range(256)) * (6 << 12)
OTHER = PATH.replace("_H0-2", "_H0-3")
NOT_FOR: dict[Role, tuple[Callable[[S3Store], object], ...]] = {
    "reader": (
        lambda store: store.put("k", b"x"),
        lambda store: store.put_if_absent("k", b"x"),
        lambda store: store.put(PATH, b"x"),
        lambda store: store.put("k", LARGE),
        lambda store: store.delete(PATH),
    ),
    "writer": (lambda store: store.delete(PATH),),
    "sweeper": (
        lambda store: store.put(PATH, b"x"),
        lambda store: store.put_if_absent(OTHER, b"x"),
        lambda store: store.put(f"{NAMESPACE}/identity.json", b"{}"),
    ),
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_is_refused_what_is_not_its_work(fleet: Fleet, role: Role) -> None:
    fleet.fill()
    refused(fleet.place(role), *NOT_FOR[role])
    assert fleet.place(None).get(PATH) == PAYLOAD
    if role == "writer":
        store = fleet.place(role)
        assert store.put_if_absent("k", LARGE) is True
        assert store.put_if_absent("k", LARGE) is False
        assert store.get("k") == LARGE


@pytest.mark.parametrize("role", ROLES)
def test_no_role_of_a_tenant_reaches_anothers(fleet: Fleet, role: Role) -> None:
    fleet.fill("b")
    fleet.fill("ab")
    for theirs in ("b", "ab"):
        refused(
            fleet.place(role, theirs),
            lambda store: store.get(PATH),
            lambda store: store.get("missing"),
            lambda store: store.head(PATH),
            lambda store: store.get_into(PATH, memoryview(bytearray(len(PAYLOAD)))),
            lambda store: store.get(PATH, 0, 8),
            lambda store: list(store.scan("")),
            lambda store: store.folders(""),
            lambda store: store.put("k", b"x"),
            lambda store: store.delete(PATH),
            lambda store: store.check(),
        )
    for prefix in ("commands/a", "commands/", "commands", ""):  # without its slash, and above
        with pytest.raises(ClientError, match="AccessDenied"):
            fleet.access(role).client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)


def run_as(fleet: Fleet, role: Role, *words: str, **settings: str) -> str:
    more = {f"OBJKV_{name.upper()}": value for name, value in settings.items()}
    ran = CliRunner().invoke(app, words, env=fleet.environment(role) | more)
    assert ran.exit_code == 0, (words, ran.output, ran.stderr)
    for secret in (PASSWORD, fleet.settings[role]["s3_secret_access_key"]):
        assert secret not in ran.output
    return ran.output


LINES = {
    "access": "access --role reader",
    "bench": "bench --quick",
    "diff": f"diff acme/tiny {FLEETS}",
    "exporter": "exporter --once",
    "ls NAMESPACE": "ls default/tiny",
    "match": "match --tokens {tokens}",
    "pin": "pin {leaf:.6}",
    "show": "show {leaf:.6} -n tiny",
    "size": "size --model qwen3-32b",
    "sweep --apply": "sweep --apply --force --grace 0",
    "top": "top --once --endpoint http://127.0.0.1:9",
    "unpin": "unpin {leaf:.6} -n tiny",
    "verify": f"verify --all -n {FLEETS[:6]}",
    "verify --quarantine": "verify --all --quarantine",
    "verify --quarantine --apply": "verify --all --quarantine --apply --force",
}
"""Command lines that differ from the name of the command."""
FOUND = {"top": 3, "verify --quarantine": 1}
"""Exit codes other than 0 of commands that work: no replica answers, or something is left to do."""
CHANGES = (
    # A payload of doctor or bench that a writer may not delete has no record.
    *("admission never", "pin", "rebuild", "rebuild --apply", "sweep --apply", "unpin"),
    *("verify --quarantine", "verify --quarantine --apply"),
)
"""Commands that need stores of their own."""
SHOWN = dict.fromkeys(("ls", "ls NAMESPACE", "ls --prefixes", "ls --tree", "audit"), FLEETS[:8])


def prepare(fleet: Fleet, command: str) -> str:
    """Save a chain with what the command is to remove; the hash of its last chunk."""
    fleet.empty()
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        keys = save(ends.bulk, ends.index)
        if command == "sweep --apply":
            ends.admin.drop(FLEETS, keys[2].prefix_hash)
        if command.startswith("verify --quarantine"):
            ends.bulk.put(keys[2].path(), b"not a payload")
        if command == "rebuild --apply":
            ends.admin.drop(FLEETS, keys[0].prefix_hash)
    return keys[2].prefix_hash.hex()


@pytest.mark.parametrize("role", ROLES)
def test_every_command_works_or_names_the_role_that_it_needs(
    fleet: Fleet, role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    tokens = tmp_path / "tokens.json"
    tokens.write_text(str(list(TOKENS)), encoding="utf-8")
    runner, wrong = CliRunner(), list[str]()
    leaf = prepare(fleet, "match")
    for command, roles in COMMAND_ROLES.items():
        if command in CHANGES:
            leaf = prepare(fleet, command)
        if command == "unpin":
            runner.invoke(app, ["pin", leaf], env=fleet.environment("sweeper"))
        places = {"tokens": tokens, "leaf": leaf}
        words = LINES.get(command, command).format(**places).split()
        ran = runner.invoke(app, words, env=fleet.environment(role))
        if role in roles:
            fine = ran.exit_code == FOUND.get(command, 0) and SHOWN.get(command, "") in ran.stdout
        else:
            fine = ran.exit_code == 2 and f"OBJKV_ROLE={roles[0]}" in ran.stderr
        if not fine:
            wrong.append(
                f"{role} {command}: {ran.exit_code} {ran.stderr[-300:]} {ran.stdout[-200:]}"
            )
    assert wrong == []


@pytest.fixture
def rules(fleet: Fleet) -> Iterator[Callable[[int], None]]:
    """Sets the bucket's lifecycle rule; it is removed at the end."""
    client = fleet.access(None).client

    def rule(name: str, days: int, *, status: str = "Enabled", prefix: str = "") -> dict[str, Any]:
        expiration = {"Filter": {"Prefix": prefix}, "Expiration": {"Days": days}}
        return {"ID": name, "Status": status} | expiration

    def expire(days: int) -> None:
        every = [rule("x", 1, prefix="other/"), rule("off", 2, status="Disabled")]
        client.put_bucket_lifecycle_configuration(
            Bucket=BUCKET, LifecycleConfiguration={"Rules": [*every, rule("ours", days)]}
        )

    yield expire
    client.delete_bucket_lifecycle(Bucket=BUCKET)


def test_lifecycle_rules_and_missing_payloads_are_seen_with_a_sweepers_rights(
    fleet: Fleet, home: None, rules: Callable[[int], None]
) -> None:
    fleet.empty()
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        save(ends.bulk, ends.index)

    def audited(role: Role) -> dict[str, Any]:
        report = json.loads(run_as(fleet, role, "audit", "--json", ttl_s="1d"))
        found: dict[str, Any] = report["lifecycle"]
        return found

    assert audited("sweeper")["status"] == "none"
    rules(1)
    found = audited("sweeper")
    assert (found["status"], found["expire_days"]) == ("conflicts", 1)
    assert "deletes payloads 1 day after" in run_as(fleet, "sweeper", "doctor", ttl_s="1d")
    found = audited("reader")
    assert (found["status"], found["expire_days"]) == ("unknown", None)
    assert "s3:GetLifecycleConfiguration" in found["detail"]
    rules(30)
    assert audited("sweeper")["status"] == "fits"
    for role, sees in (("reader", False), ("sweeper", True)):
        verified = json.loads(run_as(fleet, role, "verify", "--json"))
        assert verified["missing_seen"] is sees, "a reader cannot tell missing from refused"
