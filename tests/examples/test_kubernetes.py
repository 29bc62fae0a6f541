"""The manifests: the chart's, as Helm renders them, and those of the files next to it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from objkv import __version__
from objkv.config import Config, load_config
from objkv.config.node import agent_socket
from objkv.config.schema import SECRET_SETTINGS
from tests.agent.world import Node, http_of
from tests.examples.places import (
    CHART,
    EXAMPLES,
    OVERLAY,
    ROOT,
    SETTINGS,
    container,
    documents,
    helm,
    manifests,
    parsed,
    pods,
)

SCHEMAS = json.loads((Path(__file__).parent / "operator_schemas.json").read_text())
VERSIONS = ("1.29", kubernetes_validate.latest_version())
LABEL = "app.kubernetes.io/name"
ALL: dict[str, Any] = {
    "redisPrefix": "objkv-Acme_1",
    "image": {"pullSecrets": [{"name": "registry"}]},
    "roles": {
        "reader": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"}},
        "writer": {"secret": {"OBJKV_REDIS_PASSWORD": "not-so-secret"}},
        "sweeper": {"existingSecret": "elsewhere", "settings": {"OBJKV_TTL_S": "7200"}},
    },
    "monitoring": {
        "alerts": {"kind": "prometheusRule", "labels": {"release": "prometheus"}},
        "serviceMonitor": {"enabled": True, "vllmLabels": {LABEL: "vllm"}},
    },
    "agent": {
        "listen": {"enabled": True},
        "priorityClassName": "high",
        "nodeSelector": {"pool": "gpu"},
        "affinity": {"nodeAffinity": {}},
    },
    "networkPolicy": {"enabled": True, "scrapers": [{"namespaceSelector": {}}]},
    "nodeSelector": {"pool": "small"},
    "tolerations": [{"key": "pool", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
}
"""Values that make everything that the chart can make."""
TERRAFORM = json.loads((ROOT / "terraform" / "aws" / "tests" / "chart.json").read_text())
AGENTS: dict[str, Any] = {
    "settings": SETTINGS | {"AWS_REGION": "eu-central-1", "OBJKV_TENANT": "acme"},
    "roles": {"writer": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/w"}}},
    "agent": {"arenaMiB": 3000},
}
SET = f"--set-json=settings={json.dumps(SETTINGS)}"
ROLES = {"objkv-exporter": "reader", "objkv-sweep": "sweeper", "objkv-verify": "reader"}


def of_kind(kind: str, **values: Any) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in manifests(**values) if one["kind"] == kind}


@pytest.mark.parametrize(
    "values",
    [{}, ALL, AGENTS, TERRAFORM["helm_values"]],
    ids=["default", "all", "agents", "terraform"],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_what_the_api_takes(values: dict[str, Any], version: str) -> None:
    for found in manifests(**values):
        if found["apiVersion"] == "monitoring.coreos.com/v1":
            Draft202012Validator(SCHEMAS[found["kind"]]).validate(found)
        else:
            kubernetes_validate.validate(found, version, strict=True)
        assert re.fullmatch(r"[a-z0-9-]+", found["metadata"]["name"])
    kinds = {one["kind"] for one in manifests()}
    more = {one["kind"] for one in manifests(**ALL)} - kinds
    assert more == {"Secret", "ServiceMonitor", "PrometheusRule", "NetworkPolicy"}
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), SET)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["appVersion"], chart["version"]) == (__version__, __version__.replace(".d", "-d"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--set=settings.OBJKV_INDEX_URL=",), "settings.OBJKV_INDEX_URL is required"),
        # Helm would print 1000000 as 1e+06.
        (("--set=settings.OBJKV_TTL_S=1000000",), "got number, want string"),
        (("--set=sweeep.enabled=false",), "sweeep"),
        (("--set=monitoring.alerts.kind=none,sweep.role=admin",), "sweep/role"),
        (("--set=settings.OBJKV_REDIS_PASSWORD=x",), "OBJKV_REDIS_PASSWORD"),
        (("--set=settings.OBJKV_S3_REGOIN=x",), "OBJKV_S3_REGOIN"),
    ],
)
def test_a_wrong_value_is_refused(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        helm("template", "objkv", str(CHART), SET, *words)


def test_secrets_belong_into_secrets() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = Draft202012Validator(schema["definitions"]["settings"]["propertyNames"])
    for name in Config.model_fields:
        is_valid = names.is_valid(f"OBJKV_{name.upper()}")
        assert is_valid == (name not in {*SECRET_SETTINGS, "role", "redis_prefix"}), name
    assert not of_kind("Secret")


def test_pods_have_what_they_name_and_settings_that_objkv_understands() -> None:
    commands, services = {}, of_kind("Service")
    for name, pod in pods().items():
        if name == "Deployment valkey":
            continue
        spec, one, label = pod["spec"], container(name), pod["metadata"]["labels"][LABEL]
        account = spec["serviceAccountName"]
        assert account in of_kind("ServiceAccount"), name
        mounted = {mount["name"] for mount in one.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())}, name
        ports = {port["name"] for port in one.get("ports", ())}
        probes = [probe for key, probe in one.items() if key.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes if "exec" not in probe} <= ports, name
        if service := services.get(label):
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
        settings, *secret = one["envFrom"]
        # One name for all that a role has. A replica has an agent instead of a role's Secret.
        assert settings == {"configMapRef": {"name": account}}, name
        is_replica = name == "Deployment vllm"
        assert secret == ([] if is_replica else [{"secretRef": {"name": account}}]), name
        config = load_config(environ=of_kind("ConfigMap")[account]["data"])
        assert config.bulk_url == "s3://my-kv-bucket/objkv"
        # Only the sweeper of the night deletes, and only agents save.
        role = ROLES.get(label, "reader" if "warm" in name else "writer")
        assert config.role == role, name
        if not is_replica:
            assert config.redis_username == account == f"objkv-{role}"
        if "/objkv:" in one["image"]:
            commands[name] = parsed(one["args"])
    assert commands == {
        "CronJob objkv-sweep": "sweep",
        "CronJob objkv-verify": "verify",
        "DaemonSet objkv-agent": "agent",
        "Deployment objkv-exporter": "exporter",
        "Deployment valkey-rebuild": "rebuild",
        "Job objkv-warm": "warm",
    }
    words = container("Job objkv-warm")["args"]
    asked = re.fullmatch(r"http://([\w-]+):(\d+)", words[words.index("--endpoint") + 1])
    assert asked is not None
    assert int(asked[2]) in {port["port"] for port in services[asked[1]]["spec"]["ports"]}


def test_a_role_has_its_own_settings_and_secret() -> None:
    settings = of_kind("ConfigMap", **ALL)["objkv-acme-1-sweeper"]["data"]
    assert settings["OBJKV_TTL_S"] == "7200"
    assert settings["OBJKV_REDIS_USERNAME"] == "objkv-Acme_1-sweeper"
    made = {name: one["stringData"] for name, one in of_kind("Secret", **ALL).items()}
    assert made == {"objkv-acme-1-writer": {"OBJKV_REDIS_PASSWORD": "not-so-secret"}}
    (sweep,) = pods(**ALL)["CronJob objkv-acme-1-sweep"]["spec"]["containers"]
    assert sweep["envFrom"][1] == {"secretRef": {"name": "elsewhere"}}
    alone = of_kind("ConfigMap", redisUsers=False)["objkv-writer"]["data"]
    assert "OBJKV_REDIS_USERNAME" not in alone


def test_what_is_not_a_replica_has_no_rights_that_it_does_not_need() -> None:
    for name, pod in pods(**AGENTS).items():
        if name == "Deployment vllm":
            continue
        assert pod["spec"]["securityContext"]["runAsNonRoot"], name
        for one in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())):
            security = one["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert not security["allowPrivilegeEscalation"], name
            assert security["capabilities"]["drop"] == ["ALL"], name
            added = {"CHOWN", "FOWNER"} if one["name"] == "folder" else set()
            assert set(security["capabilities"].get("add", ())) == added
    assert agent()["securityContext"]["runAsUser"] == 65532
    as_root = agent(agent=AGENTS["agent"] | {"user": 0})["securityContext"]
    assert (as_root["runAsUser"], as_root["runAsNonRoot"]) == (0, False)


def seconds(words: list[str], environment: list[dict[str, Any]]) -> tuple[int, int]:
    """Time that workers have to complete saves, and the server."""
    (grace,) = (word for word in words if word.startswith("--shutdown-timeout="))
    workers = {v["name"]: v.get("value") for v in environment}
    return int(workers["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]), int(grace.partition("=")[2])


def test_a_replica_may_finish_its_saves_and_an_agent_too() -> None:
    """Workers' time is within the server's, and that within the pod's."""
    one = container("Deployment vllm")
    grace = pods()["Deployment vllm"]["spec"]["terminationGracePeriodSeconds"]
    workers, server = seconds(one["args"], one["env"])
    assert workers < server < grace
    (model,) = documents(OVERLAY)[0]["servingEngineSpec"]["modelSpec"]
    workers, server = seconds(model["vllmConfig"]["extraArgs"], model["env"])
    assert workers < server < 30, "Kubernetes' default: that chart sets no other"
    needed_s = (Config().load_deadline_ms + Config().drain_deadline_ms) / 1000
    assert agent()["terminationGracePeriodSeconds"] > needed_s
    assert "maxSurge" not in json.dumps(named("DaemonSet", "objkv-agent")["spec"]["updateStrategy"])


def test_dashboard_and_alerts_are_those_of_the_monitoring_example() -> None:
    alerts = (EXAMPLES / "monitoring" / "alerts.yml").read_text()
    dashboard = (EXAMPLES / "monitoring" / "objkv-dashboard.json").read_text()
    made = of_kind("ConfigMap")
    assert made["objkv-alerts"]["data"]["alerts.yml"] == alerts
    assert made["objkv-dashboard"]["data"]["objkv-dashboard.json"] == dashboard
    monitoring = ALL["monitoring"]
    linked = {**monitoring, "alerts": {**monitoring["alerts"], "runbookUrl": "https://wiki/kv"}}
    (rule,) = of_kind("PrometheusRule", **(ALL | {"monitoring": linked})).values()
    default = "https://example.com/objkv/blob/HEAD/docs/operations/runbook.md"
    assert rule["spec"] == yaml.safe_load(alerts.replace(default, "https://wiki/kv"))


KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""Lists that Kubernetes merges, with what names their items. It replaces all others."""


def merged(old: Any, patch: Any, name: str = "") -> Any:
    if isinstance(old, dict) and isinstance(patch, dict):
        return old | {key: merged(old.get(key), value, key) for key, value in patch.items()}
    if isinstance(old, list) and (key := KEYS.get(name)):
        items = {one[key]: one for one in old}
        for one in patch:
            items[one[key]] = merged(items.get(one[key]), one)
        return list(items.values())
    return patch


def named(kind: str, name: str, **values: Any) -> dict[str, Any]:
    return of_kind(kind, **(AGENTS | values))[name]


def agent(**values: Any) -> dict[str, Any]:
    spec: dict[str, Any] = pods(**(AGENTS | values))["DaemonSet objkv-agent"]["spec"]
    return spec


def replica(**values: Any) -> dict[str, Any]:
    """The pod of ``replicas.yaml`` after ``kubectl patch``."""
    given = named("ConfigMap", "objkv-vllm", **values)["data"]["patch.yaml"]
    patched = merged(named("Deployment", "vllm"), yaml.safe_load(given))
    spec: dict[str, Any] = patched["spec"]["template"]["spec"]
    return spec


def environment(spec: dict[str, Any], **values: Any) -> dict[str, str]:
    (one,) = spec["containers"]
    found: dict[str, str] = {}
    for source in one["envFrom"]:
        if reference := source.get("configMapRef"):
            found |= named("ConfigMap", reference["name"], **values)["data"]
    return found | {each["name"]: each["value"] for each in one["env"] if "value" in each}


def secrets(spec: dict[str, Any]) -> set[str]:
    (one,) = spec["containers"]
    given = [each["secretRef"] for each in one["envFrom"] if "secretRef" in each]
    sources = [each.get("valueFrom", {}) for each in one["env"]]
    given += [each["secretKeyRef"] for each in sources if "secretKeyRef" in each]
    assert not [each for each in spec["volumes"] if "secret" in each or "projected" in each]
    return {each["name"] for each in given}


def test_only_agents_have_credentials() -> None:
    roles = {"writer": {"secret": {"OBJKV_REDIS_PASSWORD": "not-so-secret"}}}
    for values in ({}, {"roles": roles}):
        assert secrets(agent(**values)) == {"objkv-writer"}
        assert secrets(replica(**values)) == {"hugging-face"}, "for the model's download"
    assert agent()["serviceAccountName"] == "objkv-writer"
    given = [replica(roles=roles), named("ConfigMap", "objkv-replica", roles=roles)]
    assert "not-so-secret" not in json.dumps(given)
    spec = replica()
    account = named("ServiceAccount", spec["serviceAccountName"])
    assert "annotations" not in account["metadata"], "no cloud identity either"
    assert spec["automountServiceAccountToken"] is False
    places = ("AWS_", "OBJKV_S3_", "OBJKV_REDIS_", "OBJKV_INDEX_")
    assert not [name for name in environment(spec) if name.startswith(places)]


def test_replicas_get_their_own_setting_of_agents() -> None:
    theirs = {"OBJKV_AGENT_VERIFY": "reader", "OBJKV_AGENT_DISK_URL": "file:///disk"}
    roles = {"writer": {"settings": theirs}}
    names = environment(replica(roles=roles), roles=roles).keys() & theirs.keys()
    assert names == {"OBJKV_AGENT_VERIFY"}


def test_replicas_and_agent_mean_the_same_socket_and_the_same_tenant() -> None:
    folders, configs = [], []
    for spec in (agent(), replica()):
        configs.append(load_config(environ=environment(spec)))
        path = agent_socket(configs[-1])
        assert path is not None
        (one,) = spec["containers"]
        (mount,) = (m for m in one["volumeMounts"] if m["mountPath"] == str(path.parent))
        (volume,) = (v for v in spec["volumes"] if v["name"] == mount["name"])
        folders.append((path, volume["hostPath"]))
    assert folders[0] == folders[1]
    assert folders[0][1] == {"path": "/run/objkv", "type": "DirectoryOrCreate"}
    theirs, ours = configs
    assert theirs.agent_memory_bytes == 3000 << 20
    assert (theirs.tenant, ours.tenant, ours.role) == ("acme", "acme", "writer")
    assert ours.bulk_url == theirs.bulk_url, "it decides whether a replica's KV is local"
    other = pods(**AGENTS, redisPrefix="objkv_B")["DaemonSet objkv-b-agent"]["spec"]["volumes"]
    (path,) = (volume["hostPath"]["path"] for volume in other if "hostPath" in volume)
    assert path == "/run/objkv-b", "installations share no socket"


def run(command: list[str]) -> int:
    assert command[0] == "python3"
    return subprocess.run([sys.executable, *command[1:]], capture_output=True).returncode


def test_the_folder_becomes_the_agents_own(tmp_path: Path) -> None:
    (one,) = agent()["initContainers"]
    assert one["args"] == ["/run/objkv", "65532", "65532"]
    tmp_path.chmod(0o755)
    user, group = str(os.geteuid()), str(os.getegid())
    assert run([*one["command"], str(tmp_path), user, group]) == 0
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_the_probes_tell_an_agent_that_answers_from_one_that_does_not() -> None:
    (one,) = agent()["containers"]
    assert one["resources"]["limits"]["memory"] == "7352Mi", "the arena and its work fit into it"
    (command,) = {
        tuple(one[probe]["exec"]["command"])
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
