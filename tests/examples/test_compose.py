"""The Compose files, as Docker Compose itself reads them. They are run in ``test_fleet``."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from objkv.config import Config, load_config
from objkv.config.node import agent_socket
from tests.agent.world import Node, http_of
from tests.examples.commands import parsed
from tests.examples.places import COMPOSE, EXAMPLES, ROOT, compose

GIVEN = {"MODEL": "some/model", "REDIS_PASSWORD": "red-secret", "S3_SECRET_KEY": "s3-secret"}


def test_secrets_and_the_model_have_to_be_given() -> None:
    for name in GIVEN:
        with pytest.raises(ValueError, match=f"{name}.*set it in .env"):
            compose(**{other: value for other, value in GIVEN.items() if other != name})


def test_every_variable_of_the_files_is_in_the_example_of_env() -> None:
    example = re.findall(r"^(\w+)=", (COMPOSE / ".env.example").read_text(), re.MULTILINE)
    used = re.findall(r"\$\{(\w+)", (COMPOSE / "compose.yaml").read_text())
    assert set(used) == set(example)
    assert (COMPOSE / ".gitignore").read_text().split() == [".env"]


def test_both_replicas_are_the_same_but_for_their_port_and_gpu() -> None:
    services = compose(**GIVEN)["services"]
    first, second = services["replica-1"], services["replica-2"]
    differing = {name for name in first if first[name] != second[name]}
    assert differing == {"ports", "deploy"}


def test_servers_start_as_vllm_recommends() -> None:
    for name in ("replica-1", "replica-2"):
        replica = compose(**GIVEN)["services"][name]
        assert replica["entrypoint"] == ["vllm", "serve"]
        assert replica["command"][0] == GIVEN["MODEL"]


def test_no_page_or_example_names_a_module_that_vllm_calls_deprecated() -> None:
    files = [file for folder in (ROOT / "docs", EXAMPLES) for file in folder.rglob("*.*")]
    for file in (*files, ROOT / "README.md"):
        if file.suffix in (".md", ".sh", ".yaml", ".py"):
            assert "vllm.entrypoints.openai" not in file.read_text(), file


def test_further_arguments_go_to_both_replicas() -> None:
    services = compose(**GIVEN, VLLM_ARGS="--max-model-len 4096 --enforce-eager")["services"]
    for name in ("replica-1", "replica-2"):
        assert services[name]["command"][-3:] == ["--max-model-len", "4096", "--enforce-eager"]


def test_objkv_understands_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    services = compose(**GIVEN)["services"]
    for name in ("replica-1", "replica-2", "bucket", "exporter", "objkv"):
        with monkeypatch.context() as environment:
            for variable, value in services[name]["environment"].items():
                environment.setenv(variable, value)
            config = load_config()
        assert config.bulk_url == "s3://kv-cache/objkv"
        assert config.s3_endpoint_url == "http://s3:8333"
        assert config.redis_password is not None


def test_objkv_has_the_commands() -> None:
    services = compose(**GIVEN)["services"]
    assert parsed(services["exporter"]["command"]) == "exporter"


def test_who_is_asked_is_there() -> None:
    """Names and ports in settings, dependencies and health checks are those of services."""
    made = compose(**GIVEN)
    services = made["services"]
    for url in ("OBJKV_S3_ENDPOINT_URL", "OBJKV_INDEX_URL"):
        host = re.sub(r".*//([\w-]+):.*", r"\1", services["objkv"]["environment"][url])
        assert host in services
    for service in services.values():
        for name, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[name]


def test_nothing_is_reached_from_other_machines() -> None:
    for service in compose(**GIVEN)["services"].values():
        assert {port.get("host_ip") for port in service.get("ports", ())} <= {"127.0.0.1"}


def test_images_are_pinned() -> None:
    for service in compose(**GIVEN)["services"].values():
        if "build" not in service:
            assert re.search(r":\d+\.\d+$", service["image"])
    assert compose(**GIVEN)["services"]["replica-1"]["build"]["args"] == {
        "VLLM_IMAGE": "vllm/vllm-openai:v0.33.0"
    }


def test_without_gpus_nothing_asks_for_one() -> None:
    services = compose("compose.yaml", "compose.cpu.yaml", **GIVEN)["services"]
    for number in (1, 2):
        replica = services[f"replica-{number}"]
        assert "deploy" not in replica
        assert replica["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "4"
        assert replica["environment"]["OBJKV_BULK_URL"] == "s3://kv-cache/objkv"


def with_agent(*more: str) -> dict[str, Any]:
    return compose("compose.yaml", "compose.agent.yaml", *more, **GIVEN)


def test_with_an_agent_replicas_have_no_passwords_and_find_it() -> None:
    services = with_agent("compose.cpu.yaml")["services"]
    agent = services["agent"]
    program, option, path = agent["command"]
    assert (program, option) == ("agent", "--socket")
    assert parsed(agent["command"]) == "agent"
    for number in (1, 2):
        replica = services[f"replica-{number}"]
        assert "secret" not in str(replica["environment"])
        assert replica["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "4"
        ours = {n: v for n, v in replica["environment"].items() if n.startswith("OBJKV_")}
        assert agent_socket(load_config(environ=ours)) == Path(path)
        assert replica["depends_on"] == {
            "agent": {"condition": "service_healthy", "required": True}
        }
        targets = {one["target"]: one["source"] for one in replica["volumes"]}
        assert targets["/root/.cache/huggingface"] == "models"
        (mount,) = agent["volumes"]
        assert targets[str(Path(path).parent)] == mount["source"] == "socket"
    theirs = load_config(environ=agent["environment"])
    assert ours["OBJKV_BULK_URL"] == theirs.bulk_url
    assert theirs.redis_password == GIVEN["REDIS_PASSWORD"]


def test_the_agent_starts_with_the_rest_has_its_memory_and_may_complete_its_saves() -> None:
    agent = with_agent()["services"]["agent"]
    assert not agent.get("profiles")
    arena = load_config(environ=agent["environment"]).agent_memory_bytes
    assert int(agent["mem_limit"]) == arena + (1 << 30)
    config = Config()
    needed_s = (config.load_deadline_ms + config.drain_deadline_ms) / 1000
    assert agent["stop_grace_period"] == "1m0s"
    assert needed_s < 60
    assert agent["read_only"]
    assert agent["cap_drop"] == ["ALL"]
    options = with_agent()["volumes"]["socket"]["driver_opts"]["o"]
    assert "uid=65532" in options, "the user of the image"
    assert "user" not in agent
    assert "agent" not in compose(**GIVEN)["services"], "off by default"


def test_the_agents_health_is_asked_for_on_its_socket() -> None:
    agent = with_agent()["services"]["agent"]
    kind, python, *words, path = agent["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python3")
    assert path == f"{agent['command'][-1]}.http"
    node = Node()
    try:
        with http_of(node) as socket:
            command = [sys.executable, *words, str(socket)]
            assert subprocess.run(command, capture_output=True).returncode == 0
        assert subprocess.run(command, capture_output=True).returncode != 0
    finally:
        node.close()
