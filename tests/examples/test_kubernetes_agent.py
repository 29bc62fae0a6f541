"""Agents in Kubernetes: off by default; they alone have credentials, and replicas find them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from objkv.config import Config, load_config
from objkv.config.node import agent_socket
from tests.agent.world import Node, http_of
from tests.examples.commands import parsed
from tests.examples.places import CHART, SETTINGS, helm, manifests, pods

ROLE = "arn:aws:iam::1:role/writer"
VALUES: dict[str, Any] = {
    "settings": SETTINGS | {"AWS_REGION": "eu-central-1", "OBJKV_TENANT": "acme"},
    "roles": {"writer": {"annotations": {"eks.amazonaws.com/role-arn": ROLE}}},
    "agent": {"enabled": True, "arenaMiB": 3000},
}
KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
"""Lists that Kubernetes merges, with what names their items. It replaces all others."""


def merged(old: Any, patch: Any, name: str = "") -> Any:
    """What a strategic merge patch makes of an object."""
    if isinstance(old, dict) and isinstance(patch, dict):
        changed = {key: merged(old.get(key), value, key) for key, value in patch.items()}
        return old | changed
    if isinstance(old, list) and (key := KEYS.get(name)):
        items = {one[key]: one for one in old}
        for one in patch:
            items[one[key]] = merged(items.get(one[key]), one)
        return list(items.values())
    return patch


def named(kind: str, name: str, **values: Any) -> dict[str, Any]:
    (found,) = (
        one
        for one in manifests(**(VALUES | values))
        if (one["kind"], one["metadata"]["name"]) == (kind, name)
    )
    return found


def replica(**values: Any) -> dict[str, Any]:
    """The pod of ``replicas.yaml`` after ``kubectl patch``."""
    given = named("ConfigMap", "objkv-vllm", **values)["data"]["patch.yaml"]
    patched = merged(named("Deployment", "vllm"), yaml.safe_load(given))
    spec: dict[str, Any] = patched["spec"]["template"]["spec"]
    return spec


def agent(**values: Any) -> dict[str, Any]:
    spec: dict[str, Any] = pods(**(VALUES | values))["DaemonSet objkv-agent"]["spec"]
    return spec


def environment(spec: dict[str, Any], **values: Any) -> dict[str, str]:
    """The environment of a pod's container, without what comes from Secrets."""
    (container,) = spec["containers"]
    found: dict[str, str] = {}
    for source in container["envFrom"]:
        if reference := source.get("configMapRef"):
            found |= named("ConfigMap", reference["name"], **values)["data"]
    return found | {one["name"]: one["value"] for one in container["env"] if "value" in one}


def secrets(spec: dict[str, Any]) -> set[str]:
    """The names of all Secrets that a pod's container gets."""
    (container,) = spec["containers"]
    given = [one["secretRef"] for one in container["envFrom"] if "secretRef" in one]
    sources = [one.get("valueFrom", {}) for one in container["env"]]
    given += [one["secretKeyRef"] for one in sources if "secretKeyRef" in one]
    assert not [one for one in spec["volumes"] if "secret" in one or "projected" in one]
    return {one["name"] for one in given}


def test_without_being_asked_for_there_is_none() -> None:
    assert not [name for name in pods() if name.startswith("DaemonSet")]
    words = [f"--set-json=settings={json.dumps(SETTINGS)}", "--set=agent.enabled=true"]
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *words)


def test_without_agents_no_replica_starts_one_in_its_pod() -> None:
    """It would end with the pod, and lose what it holds back."""
    off = {"agent": {"enabled": False}}
    assert environment(replica(**off), **off)["OBJKV_AGENT"] == "off"
    chosen = off | {"settings": SETTINGS | {"OBJKV_AGENT": "auto"}}
    assert environment(replica(**chosen), **chosen)["OBJKV_AGENT"] == "auto"
    (container,) = agent()["containers"]
    assert "OBJKV_AGENT" not in named("ConfigMap", "objkv-writer")["data"]
    assert [one["name"] for one in container["env"]].count("OBJKV_AGENT") == 1


def test_only_agents_have_credentials() -> None:
    assert secrets(agent()) == {"objkv-writer"}
    assert agent()["serviceAccountName"] == "objkv-writer"
    spec = replica()
    assert secrets(spec) == {"hugging-face"}, "for the model's download"
    account = named("ServiceAccount", spec["serviceAccountName"])
    assert "annotations" not in account["metadata"], "no cloud identity either"
    assert spec["automountServiceAccountToken"] is False
    places = ("AWS_", "OBJKV_S3_", "OBJKV_REDIS_", "OBJKV_INDEX_")
    assert not [name for name in environment(spec) if name.startswith(places)]


def test_a_secret_that_the_chart_makes_goes_to_agents_only() -> None:
    roles = {"writer": {"secret": {"OBJKV_REDIS_PASSWORD": "not-so-secret"}}}
    assert secrets(agent(roles=roles)) == {"objkv-writer"}
    assert secrets(replica(roles=roles)) == {"hugging-face"}
    assert "not-so-secret" not in json.dumps(
        [replica(roles=roles), named("ConfigMap", "objkv-replica", roles=roles)]
    )


def test_replicas_and_agent_mean_the_same_socket_and_the_same_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders, configs = [], []
    for spec in (agent(), replica()):
        with monkeypatch.context() as patch:
            for name, value in environment(spec).items():
                patch.setenv(name, value)
            configs.append(load_config())
        path = agent_socket(configs[-1])
        assert path is not None
        (container,) = spec["containers"]
        (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == str(path.parent))
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        folders.append((path, volume["hostPath"]))
    assert folders[0] == folders[1]
    assert folders[0][1] == {"path": "/run/objkv", "type": "DirectoryOrCreate"}
    theirs, ours = configs
    assert theirs.agent_memory_bytes == 3000 << 20
    assert (theirs.tenant, ours.tenant, ours.role) == ("acme", "acme", "writer")
    assert ours.bulk_url == theirs.bulk_url, "it decides whether a replica's KV is local"


def test_installations_do_not_share_a_socket() -> None:
    (volume,) = (
        volume
        for volume in pods(**(VALUES | {"redisPrefix": "objkv_B"}))["DaemonSet objkv-b-agent"][
            "spec"
        ]["volumes"]
        if "hostPath" in volume
    )
    assert volume["hostPath"]["path"] == "/run/objkv-b"


def test_the_arena_fits_into_the_containers_memory() -> None:
    (container,) = agent()["containers"]
    assert container["resources"]["limits"]["memory"] == "4024Mi"
    assert container["resources"]["requests"]["memory"] == "4024Mi"


def test_an_agent_may_complete_its_loads_and_saves() -> None:
    config = Config()
    needed_s = (config.load_deadline_ms + config.drain_deadline_ms) / 1000
    assert agent()["terminationGracePeriodSeconds"] > needed_s
    assert "maxSurge" not in json.dumps(named("DaemonSet", "objkv-agent")["spec"]["updateStrategy"])


def test_an_agent_may_do_little_and_its_first_container_only_gives_it_the_folder() -> None:
    spec = agent()
    assert parsed(spec["containers"][0]["args"]) == "agent"
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 65532
    for container in (*spec["containers"], *spec["initContainers"]):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        added = {"CHOWN", "FOWNER"} if container["name"] == "folder" else set()
        assert set(security["capabilities"].get("add", ())) == added
        assert security["capabilities"]["drop"] == ["ALL"]
    as_root = agent(agent=VALUES["agent"] | {"user": 0})["securityContext"]
    assert (as_root["runAsUser"], as_root["runAsNonRoot"]) == (0, False)


def run(command: list[str], **replaced: str) -> int:
    """The exit status of a container's command on this machine."""
    words = [replaced.get(word, word) for word in command]
    assert words[0] == "python3"
    return subprocess.run([sys.executable, *words[1:]], capture_output=True).returncode


def test_the_folder_becomes_the_agents_own(tmp_path: Path) -> None:
    (container,) = agent()["initContainers"]
    assert container["args"] == ["/run/objkv", "65532", "65532"]
    tmp_path.chmod(0o755)
    user, group = str(os.geteuid()), str(os.getegid())
    assert run([*container["command"], str(tmp_path), user, group]) == 0
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert tmp_path.stat().st_uid == os.geteuid()


def test_the_probes_tell_an_agent_that_answers_from_one_that_does_not() -> None:
    (container,) = agent()["containers"]
    (command,) = {
        tuple(container[probe]["exec"]["command"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    *program, socket = command
    assert socket == f"{environment(agent())['OBJKV_AGENT'].removeprefix('unix://')}.http"
    node = Node()
    try:
        with http_of(node) as path:
            assert run([*program, str(path)]) == 0
        assert run([*program, str(path)]) != 0
    finally:
        node.close()


def test_prometheus_and_routers_reach_agents_if_asked_for() -> None:
    listen = VALUES | {
        "agent": VALUES["agent"] | {"listen": {"enabled": True, "port": 9999}},
        "networkPolicy": {"enabled": True},
        "monitoring": {"serviceMonitor": {"enabled": True}},
    }
    (container,) = agent(**listen)["containers"]
    environ = {one["name"]: one for one in container["env"]}
    assert environ["OBJKV_AGENT_LISTEN"]["value"] == "0.0.0.0:9999"
    token = environ["OBJKV_AGENT_TOKEN"]["valueFrom"]["secretKeyRef"]
    (port,) = container["ports"]
    service = named("Service", "objkv-agent", **listen)["spec"]
    assert (port["containerPort"], service["ports"][0]["targetPort"]) == (9999, port["name"])
    assert service["clusterIP"] == "None", "each node has an agent of its own"
    (endpoint,) = named("ServiceMonitor", "objkv-agent", **listen)["spec"]["endpoints"]
    assert endpoint["port"] == service["ports"][0]["name"]
    assert endpoint["authorization"]["credentials"] == token
    ingress = named("NetworkPolicy", "objkv", **listen)["spec"]["ingress"][0]["ports"]
    assert {"port": 9999} in ingress
    assert "OBJKV_AGENT_LISTEN" not in json.dumps(agent())
    assert secrets(replica(**listen)) == {"hugging-face"}
