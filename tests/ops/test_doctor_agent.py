"""The doctor's checks of a node agent and, by it, of its stores."""

import logging
from pathlib import Path
from typing import Any

import pytest

from objkv.config import Config
from objkv.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from objkv.ops.agent_api import AgentApi
from objkv.ops.doctor import agent as module
from objkv.ops.doctor.agent import check_agent
from objkv.ops.doctor.probes import Check
from tests.agent.world import REPLICAS, Node, denied, down, http_of, put_policy
from tests.support.agents import agent_folder


def config(path: Path, **changes: Any) -> Config:
    urls = {"bulk_url": "file:///dev/null/kv", "index_url": "sqlite:///dev/null/i"}
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
        monkeypatch.setattr(module, "host_bytes", lambda: 1 << 20)
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
        patched.setattr(module, "VERSION", 999)
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

    monkeypatch.setattr(module.Arena, "create", refuse)
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
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert found(tmp_path / "a") == "failed"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
