"""The doctor's checks of a node agent."""

from pathlib import Path

import pytest

from objkv.config import Config
from objkv.errors import ConfigError
from objkv.ops.doctor import agent as module
from objkv.ops.doctor.agent import check_agent
from tests.agent.world import Node
from tests.support.agents import agent_folder


def config(path: Path) -> Config:
    return Config(
        bulk_url="file:///dev/null/kv", index_url="sqlite:///dev/null/i", agent=f"unix://{path}"
    )


def statuses(settings: Config) -> dict[str, str]:
    return {check.name: check.status for check in check_agent(settings)}


def test_a_private_agent_is_not_looked_for() -> None:
    first, *others = check_agent(Config(agent="private"))
    assert (first.status, first.detail) == ("ok", "each replica starts its own")
    assert "socket folder" not in {check.name for check in others}


def test_an_agent_that_answers_is_fine_unless_its_arena_is_huge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node().listen()
    found = check_agent(config(node.path))
    assert {check.status for check in found} == {"ok"}
    assert "arena of 2 MiB" in found[0].detail
    monkeypatch.setattr(module, "host_bytes", lambda: 1 << 20)
    assert statuses(config(node.path))["arena size"] == "warning"
    node.close()


@pytest.mark.parametrize(
    ("endpoint", "status", "said"),
    [
        ("https://minio:9000", "ok", "all: minio, a private address: no price"),
        ("https://s3.amazonaws.com", "ok", "prices of S3 Standard: $0.005 for 1,000 PUTs"),
        ("https://kv.example.com", "warning", "since kv.example.com is not known"),
    ],
)
def test_it_says_what_is_put_and_why(endpoint: str, status: str, said: str) -> None:
    with agent_folder() as folder:
        settings = Config(
            bulk_url="s3://kv",
            index_url="sqlite:///dev/null/i",
            s3_endpoint_url=endpoint,
            agent=f"unix://{folder}/s",
        )
        (found,) = [check for check in check_agent(settings) if check.name == "saves"]
    assert (found.status, said in found.detail) == (status, True), found
    assert bool(found.fix) == (status == "warning")


def test_an_agent_that_does_not_answer_is_unreachable_with_a_fix() -> None:
    with agent_folder() as folder:
        (first, *_) = check_agent(config(folder / "s"))
    assert first.status == "unreachable"
    assert "objkv agent --socket" in first.fix


def test_a_folder_that_others_can_write_is_a_warning() -> None:
    with agent_folder() as folder:
        for mode, status in ((0o700, "ok"), (0o770, "warning"), (0o1777, "ok")):
            folder.chmod(mode)
            assert statuses(config(folder / "s"))["socket folder"] == status


def test_one_that_the_first_replica_will_start_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with agent_folder() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        settings = Config(bulk_url=f"file://{folder}", agent="auto")
        assert statuses(settings)["socket"] == "ok"
        (folder / "objkv").chmod(0o777)
        (found,) = check_agent(settings)
        assert found.status == "warning"


def test_a_system_without_sealed_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise ConfigError("the system makes no memfd")

    node = Node().listen()
    monkeypatch.setattr(module.Arena, "create", refuse)
    assert statuses(config(node.path))["shared memory"] == "failed"
    node.close()


def test_the_folder_of_the_disk_must_be_writable_and_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(path: Path, nbytes: int = 0) -> str:
        disk = {"agent_disk_url": f"file://{path}", "agent_disk_bytes": nbytes}
        return statuses(config(tmp_path / "s").model_copy(update=disk))["disk"]

    assert "disk" not in statuses(config(tmp_path / "s"))
    assert found(tmp_path / "a" / "b") == "ok"
    assert found(tmp_path / "a", 1 << 60) == "warning"
    (tmp_path / "file").write_bytes(b"")
    assert found(tmp_path / "file") == "failed"
    monkeypatch.setattr(module.os, "access", lambda *_: False)
    assert found(tmp_path / "a") == "failed"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
