"""The Compose files, as Docker Compose itself reads them."""

import re
from pathlib import Path
from typing import Any

import pytest

from objkv.config import Config, load_config
from objkv.config.node import agent_socket
from objkv.ops.doctor.access import COMMAND_ROLES
from tests.examples.places import COMPOSE, GIVEN, compose, parsed

REPLICAS = ("replica-1", "replica-2")


def services(*files: str, **variables: str) -> dict[str, Any]:
    found: dict[str, Any] = compose(*files, **GIVEN, **variables)["services"]
    return found


def test_secrets_and_the_model_have_to_be_given() -> None:
    for name in GIVEN:
        with pytest.raises(ValueError, match=f"{name}.*set it in .env"):
            compose(**{other: value for other, value in GIVEN.items() if other != name})
    example = re.findall(r"^(\w+)=", (COMPOSE / ".env.example").read_text(), re.MULTILINE)
    used = re.findall(r"\$\{(\w+)", (COMPOSE / "compose.yaml").read_text())
    assert set(used) == set(example)
    assert (COMPOSE / ".gitignore").read_text().split() == [".env"]


def test_objkv_understands_settings_and_commands() -> None:
    made = services("compose.yaml", "compose.cpu.yaml")
    assert "deploy" not in made["replica-1"], "no GPU is asked for"
    for name in ("agent", "bucket", "exporter", "objkv", "rebuild", "sweep"):
        config = load_config(environ=made[name]["environment"])
        assert config.bulk_url == "s3://kv-cache/objkv"
        assert config.s3_endpoint_url == "http://s3:8333"
        assert config.redis_password is not None
    commands = {"exporter": "exporter", "rebuild": "rebuild --apply", "sweep": "sweep --apply"}
    for name, command in commands.items():
        words = made[name]["command"]
        assert parsed(words) == words[0]
        assert command.split() == words[: len(command.split())]
        role = made[name]["environment"].get("OBJKV_ROLE", "writer")
        assert role in COMMAND_ROLES[command]


def test_who_is_asked_is_there_and_nothing_is_reached_from_other_machines() -> None:
    made = services()
    for url in ("OBJKV_S3_ENDPOINT_URL", "OBJKV_INDEX_URL"):
        host = re.sub(r".*//([\w-]+):.*", r"\1", made["objkv"]["environment"][url])
        assert host in made
    for service in made.values():
        for name, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in made[name]
        assert {port.get("host_ip") for port in service.get("ports", ())} <= {"127.0.0.1"}
        if "build" not in service:
            assert re.search(r":\d+\.\d+$", service["image"]), "images are pinned"


def test_replicas_have_no_passwords_and_find_their_agent() -> None:
    made = compose("compose.yaml", "compose.cpu.yaml", **GIVEN)
    agent, volume = made["services"]["agent"], made["volumes"]["socket"]
    program, option, path = agent["command"]
    assert (program, option, parsed(agent["command"])) == ("agent", "--socket", "agent")
    theirs = load_config(environ=agent["environment"])
    assert theirs.redis_password == GIVEN["REDIS_PASSWORD"]
    for name in REPLICAS:
        replica = made["services"][name]
        assert "secret" not in str(replica["environment"])
        ours = {n: v for n, v in replica["environment"].items() if n.startswith("OBJKV_")}
        assert agent_socket(load_config(environ=ours)) == Path(path)
        assert ours["OBJKV_BULK_URL"] == theirs.bulk_url
        assert replica["depends_on"]["agent"]["condition"] == "service_healthy"
        targets = {one["target"]: one["source"] for one in replica["volumes"]}
        assert targets[str(Path(path).parent)] == agent["volumes"][0]["source"] == "socket"
    assert int(agent["mem_limit"]) == theirs.agent_memory_bytes * 5 // 4 + (256 << 20)
    assert agent["stop_grace_period"] == "1m0s"
    assert (Config().load_deadline_ms + Config().drain_deadline_ms) / 1000 < 60
    assert (agent["read_only"], agent["cap_drop"]) == (True, ["ALL"])
    assert "uid=65532" in volume["driver_opts"]["o"], "the user of the image"
    assert agent["healthcheck"]["test"][-1] == f"{path}.http"
