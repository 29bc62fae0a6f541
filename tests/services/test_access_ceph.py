"""The bucket rights of each role on a real S3 server: enough for its work, nothing beyond it."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from objkv.assembly.backends import open_backends
from objkv.cli.app import app
from objkv.config import Config, Role
from objkv.errors import StoreDenied
from objkv.index.memory import MemoryIndex
from objkv.ops.doctor.access import ROLES, access_of
from objkv.stores.s3.client import open_s3_client
from objkv.stores.s3.store import S3Store
from objkv.telemetry import NullRecorder
from tests.services.access_fleet import Fleet, run
from tests.services.access_roles import KEY, NAMESPACE, PAYLOAD, WORK
from tests.support.paged_cache import HASHES, Replica
from tests.support.paged_cache import NAMESPACE as CHUNKS
from tests.support.samples import NAMESPACE as FLEETS
from tests.support.samples import save, save_identity
from tests.support.servers.ceph import CephUsers, S3Server
from tests.support.servers.fixtures import BUCKET, PART_BYTES, s3_config
from tests.support.servers.redis import RedisServer, valkey_server, wait_until

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]

PATH = KEY.path()


@pytest.fixture(scope="module")
def users(s3_server: S3Server) -> CephUsers:
    return CephUsers(s3_server)


class Tenants:
    """Tenants below one prefix, and their users."""

    def __init__(self, server: S3Server, users: CephUsers) -> None:
        self._server = server
        self._users = users
        self._granted: dict[Role, Config] = {}
        self._clients: dict[Role | None, Any] = {}

    def config(self, tenant: str, **changes: Any) -> Config:
        """Stores with all rights."""
        place = f"s3://{BUCKET}/tenants/{tenant}".rstrip("/")
        given = {"bulk_url": place, "index_url": "memory:", "s3_hedge_percent_max": 0}
        return s3_config(self._server, **given | changes)

    def granted(self, role: Role) -> Config:
        """Return the settings that ``role`` of tenant ``a`` gets; its user has the printed
        policy."""
        if role not in self._granted:
            found = access_of(self.config(""), role, tenant="a")
            assert found.iam is not None
            access_key, secret_key = self._users.add(role, found.iam)
            secrets = {"s3_access_key_id": access_key, "s3_secret_access_key": secret_key}
            self._granted[role] = self.config("a", role=role, **secrets)
        return self._granted[role]

    def place(self, role: Role | None, tenant: str = "a") -> S3Store:
        """The store alone, so that the server's own reply is visible: with the rights of ``role``
        of tenant ``a``, None for all. ``tenant`` owns the place; all stores of a role share a
        client."""
        if role not in self._clients:
            config = self.config("a") if role is None else self.granted(role)
            self._clients[role] = open_s3_client(config)
        prefix = f"tenants/{tenant}"
        client = self._clients[role]
        return S3Store(client, bucket=BUCKET, prefix=prefix, multipart_bytes=PART_BYTES)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def prepare(self, tenant: str = "a", *, empty: bool = False) -> None:
        """One chunk, saved with all rights, or nothing."""
        store = self.place(None, tenant)
        for entry in store.scan(""):
            store.delete(entry.key)
        if not empty:
            store.put(PATH, PAYLOAD)
            store.put(f"{NAMESPACE}/identity.json", b"{}")


@pytest.fixture(scope="module")
def tenants(s3_server: S3Server, users: CephUsers) -> Iterator[Tenants]:
    tenants = Tenants(s3_server, users)
    yield tenants
    tenants.close()


@pytest.mark.parametrize("role", ROLES)
def test_each_role_does_its_work_with_the_policy_that_is_printed(
    tenants: Tenants, role: Role
) -> None:
    tenants.prepare(empty=role == "writer")
    WORK[role](tenants.granted(role))


def test_a_writer_uploads_in_parts(tenants: Tenants) -> None:
    store, value = tenants.place("writer"), bytes(range(256)) * (6 << 12)
    assert store.put_if_absent("k", value) is True
    assert store.put_if_absent("k", value) is False
    assert store.get("k") == value


def refused(store: S3Store, *calls: Callable[[S3Store], object]) -> None:
    """The server refuses every call for want of a permission."""
    for call in calls:
        with pytest.raises(StoreDenied, match="lack a permission"):
            call(store)


LARGE = b"x" * (PART_BYTES + 1)


def test_a_reader_neither_writes_nor_deletes(tenants: Tenants) -> None:
    tenants.prepare()
    refused(
        tenants.place("reader"),
        lambda store: store.put("k", b"x"),
        lambda store: store.put_if_absent("k", b"x"),
        lambda store: store.put(PATH, b"x"),
        lambda store: store.put("k", LARGE),
        lambda store: store.delete(PATH),
        lambda store: list(store.unfinished()),
    )
    assert tenants.place(None).get(PATH) == PAYLOAD


def test_a_writer_deletes_nothing(tenants: Tenants) -> None:
    tenants.prepare()
    refused(
        tenants.place("writer"),
        lambda store: store.delete(PATH),
        lambda store: list(store.unfinished()),
    )
    assert tenants.place(None).get(PATH) == PAYLOAD


def test_a_sweeper_puts_no_payload(tenants: Tenants) -> None:
    tenants.prepare()
    other = PATH.replace("_H0-2", "_H0-3")
    assert other != PATH
    refused(
        tenants.place("sweeper"),
        lambda store: store.put(PATH, b"x"),
        lambda store: store.put_if_absent(other, b"x"),
        lambda store: store.put(f"{NAMESPACE}/identity.json", b"{}"),
    )


@pytest.mark.parametrize("role", ROLES)
def test_no_role_of_a_tenant_reaches_anothers(tenants: Tenants, role: Role) -> None:
    tenants.prepare("b")
    tenants.prepare("ab")
    for theirs in ("b", "ab"):
        refused(
            tenants.place(role, theirs),
            lambda store: store.get(PATH),
            lambda store: store.get("missing"),
            lambda store: store.head(PATH),
            lambda store: store.get_into(PATH, memoryview(bytearray(len(PAYLOAD)))),
            lambda store: store.get_range(PATH, 0, 8),
            lambda store: list(store.scan("")),
            lambda store: store.folders(""),
            lambda store: store.put("k", b"x"),
            lambda store: store.delete(PATH),
            lambda store: store.check(),
        )
    above = tenants.place(role, "..")
    above._prefix = ""
    for prefix in ("tenants/a", "tenants/", "tenants", ""):  # without its slash, and above
        with pytest.raises(StoreDenied, match="lack a permission"):
            list(above._pages("list_objects_v2", prefix))


def test_a_policy_that_is_taken_away_is_misses_and_drops_until_it_is_back(
    tenants: Tenants, users: CephUsers
) -> None:
    """Replicas' own loads and saves; none is restarted. Two of them, because on this server a value
    is its writer's whatever policies say."""
    tenants.prepare(empty=True)
    quick = {"breaker_reset_ms": 1, "breaker_reset_max_ms": 1, "role": "writer"}
    reads, writes, _ = ROLES
    configs = [tenants.granted(role).model_copy(update=quick) for role in (writes, reads)]
    policies = [access_of(configs[0], role).iam or {} for role in (writes, reads)]
    index = MemoryIndex()
    with (
        open_backends(configs[0], NullRecorder()) as wide,
        open_backends(configs[1], NullRecorder()) as narrow,
        closing(Replica(wide.bulk, index, seed=1)) as writer,
        closing(Replica(narrow.bulk, index, seed=2)) as reader,
    ):

        def loads() -> bool:
            reader.forget()
            return not reader.load(range(2), first_block=9).failed

        def saves(chunks: range) -> bool:
            writer.save(chunks)
            return None not in index.lookup(CHUNKS, [HASHES[c] for c in chunks])

        assert saves(range(2))
        assert loads()
        users.allow_nothing("writer")
        users.allow_nothing("reader")
        assert not loads()
        assert not saves(range(2, 3))
        assert reader.recorder.value("load_errors") > 0
        assert writer.recorder.value("save_errors") > 0
        users.allow("writer", policies[0])
        users.allow("reader", policies[1])
        wait_until(loads, "loads to be hits again")
        wait_until(lambda: saves(range(2, 3)), "saves to be stored again")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def fleet(s3_server: S3Server, redis: RedisServer) -> Fleet:
    return Fleet(s3_server, redis)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.mark.parametrize("role", ROLES)
def test_the_doctor_finds_every_role_well(fleet: Fleet, home: None, role: Role) -> None:
    out = run(fleet, role, "doctor")
    assert "denied" not in out
    assert "everything works" in out


def test_operators_do_all_that_they_do_with_a_sweepers_rights(fleet: Fleet, home: None) -> None:
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        keys = save(ends.bulk, ends.index)
        first, second, last = (key.prefix_hash for key in keys)
        assert FLEETS[:8] in run(fleet, "sweeper", "ls")
        run(fleet, "sweeper", "pin", last.hex())
        assert last.hex()[:12] in run(fleet, "sweeper", "pin", "--list")
        run(fleet, "sweeper", "unpin", last.hex())
        ends.bulk.put(keys[2].path(), b"not a payload")
        run(fleet, "sweeper", "verify", "--all", "--quarantine", "--apply", "--force")
        assert ends.bulk.get(keys[2].path()) is None
        # On this server a value belongs to its writer, whatever the bucket's owner.
        assert f"quarantine/{keys[2].path()}" in [entry.key for entry in ends.bulk.scan("")]
        assert ends.index.lookup(FLEETS, [last]) == [None]
        ends.admin.drop(FLEETS, first)
        run(fleet, "sweeper", "rebuild", "--apply")
        assert ends.index.lookup(FLEETS, [first]) != [None]
        ends.admin.drop(FLEETS, second)
        run(fleet, "sweeper", "sweep", "--apply", "--grace-s", "0", "--force")
        assert ends.bulk.get(keys[1].path()) is None
        assert ends.bulk.get(keys[0].path()) is not None


@pytest.fixture
def rules(s3_server: S3Server) -> Iterator[Callable[[int], None]]:
    """Sets the bucket's lifecycle rule; it is removed at the end."""
    client = open_s3_client(s3_config(s3_server))

    def expire(days: int) -> None:
        elsewhere = {"ID": "x", "Status": "Enabled", "Filter": {"Prefix": "other/"}}
        off = {"ID": "off", "Status": "Disabled", "Filter": {"Prefix": ""}}
        ours = {"ID": "ours", "Status": "Enabled", "Filter": {"Prefix": ""}}
        every = [elsewhere | {"Expiration": {"Days": 1}}, off | {"Expiration": {"Days": 2}}]
        every += [ours | {"Expiration": {"Days": days}}]
        client.put_bucket_lifecycle_configuration(
            Bucket=BUCKET, LifecycleConfiguration={"Rules": every}
        )

    yield expire
    client.delete_bucket_lifecycle(Bucket=BUCKET)
    client.close()


def test_lifecycle_rules_are_read_and_judged_with_a_sweepers_rights(
    fleet: Fleet, home: None, rules: Callable[[int], None]
) -> None:
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        save(ends.bulk, ends.index)

    def audited(role: Role) -> dict[str, Any]:
        report = json.loads(run(fleet, role, "audit", "--json", ttl_s="1d"))
        found: dict[str, Any] = report["lifecycle"]
        return found

    assert audited("sweeper")["status"] == "none"
    rules(1)
    found = audited("sweeper")
    assert (found["status"], found["expire_days"], found["abort_days"]) == ("conflicts", 1, None)
    assert "deletes payloads 1 day after" in run(fleet, "sweeper", "doctor", ttl_s="1d")
    found = audited("reader")
    assert (found["status"], found["expire_days"]) == ("unknown", None)
    assert "s3:GetLifecycleConfiguration" in found["detail"]
    rules(30)
    assert audited("sweeper")["status"] == "fits"


def test_a_readers_reports_state_that_ghosts_are_not_seen(fleet: Fleet, home: None) -> None:
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        save(ends.bulk, ends.index)
    for role, seen in (("reader", False), ("sweeper", True)):
        for words in (("audit",), ("verify", "--all")):
            assert ("(ghosts) are not seen" in run(fleet, role, *words)) is not seen
        assert json.loads(run(fleet, role, "verify", "--json"))["ghosts_seen"] is seen


@pytest.mark.parametrize(
    "words", [("pin", "00" * 20), ("rebuild", "--apply"), ("sweep", "--apply")]
)
def test_what_a_role_may_not_do_is_a_sentence(
    fleet: Fleet, home: None, words: tuple[str, ...]
) -> None:
    with fleet.everything() as ends:
        save_identity(ends.bulk)
        save(ends.bulk, ends.index)
    ran = CliRunner().invoke(app, words, env=fleet.environment("reader"))
    assert ran.exit_code in (1, 2)
    assert "Traceback (most" not in ran.output
