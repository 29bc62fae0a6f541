"""The manifests, by the schemas of the API, and by what they say of one another."""

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from objkv.config import load_config
from tests.examples.commands import parsed
from tests.examples.places import EXAMPLES, KUBERNETES, container, documents, manifests, pods

OBJECTS = manifests()
SCHEMAS = json.loads((KUBERNETES.parents[1] / "tests/examples/operator_schemas.json").read_text())
VERSIONS = ("1.29", kubernetes_validate.latest_version())
LABEL = "app.kubernetes.io/name"


def named(found: dict[str, Any]) -> str:
    return f"{found['kind']} {found['metadata']['name']}"


def containers() -> dict[str, dict[str, Any]]:
    """The one container of each pod."""
    return {name: container(name) for name in pods()}


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == kind}


def test_there_is_all_that_a_fleet_needs() -> None:
    assert {name.split()[0] for name in map(named, OBJECTS)} == {
        *("Namespace", "ConfigMap", "ServiceAccount", "Deployment", "Service"),
        *("PodDisruptionBudget", "Job", "CronJob", "ServiceMonitor", "PrometheusRule"),
    }


@pytest.mark.parametrize("found", OBJECTS, ids=named)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_what_the_api_takes(found: dict[str, Any], version: str) -> None:
    if found["apiVersion"] == "monitoring.coreos.com/v1":
        Draft202012Validator(SCHEMAS[found["kind"]]).validate(found)
    else:
        kubernetes_validate.validate(found, version, strict=True)


def test_a_wrong_object_is_refused() -> None:
    """The schemas would notice: a name that is none, in each of the two ways of looking."""
    deployment = json.loads(json.dumps(of_kind("Deployment")["vllm"]))
    deployment["spec"]["template"]["spec"]["containers"][0]["port"] = 8000
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)
    monitor = json.loads(json.dumps(of_kind("ServiceMonitor")["vllm"]))
    monitor["spec"]["endpoints"][0]["interval"] = "often"
    assert not Draft202012Validator(SCHEMAS["ServiceMonitor"]).is_valid(monitor)


def test_kustomize_is_told_of_every_file_but_the_job() -> None:
    told = documents(KUBERNETES / "kustomization.yaml")[0]
    files = {file.name for file in KUBERNETES.glob("*.yaml")}
    assert set(told["resources"]) == files - {"kustomization.yaml", "warm.yaml"}
    assert of_kind("Job")["objkv-warm"]["metadata"]["namespace"] == told["namespace"]


def test_who_selects_finds() -> None:
    labels = {pod["metadata"]["labels"][LABEL] for pod in pods().values()}
    selected = [one["spec"]["selector"][LABEL] for one in of_kind("Service").values()]
    for kind in ("Deployment", "PodDisruptionBudget"):
        selectors = [one["spec"]["selector"] for one in of_kind(kind).values()]
        selected += [selector["matchLabels"][LABEL] for selector in selectors]
    assert set(selected) <= labels
    services = {one["metadata"]["labels"][LABEL]: one for one in of_kind("Service").values()}
    for monitor in of_kind("ServiceMonitor").values():
        service = services[monitor["spec"]["selector"]["matchLabels"][LABEL]]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_ports_accounts_volumes_and_settings_are_there() -> None:
    services = of_kind("Service")
    for name, pod in pods().items():
        spec, one = pod["spec"], container(name)
        assert spec["serviceAccountName"] in of_kind("ServiceAccount"), name
        mounted = {mount["name"] for mount in one.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())}, name
        ports = {port["name"] for port in one.get("ports", ())}
        probes = [probe for key, probe in one.items() if key.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports, name
        for source in one["envFrom"]:
            assert source["configMapRef"]["name"] in of_kind("ConfigMap"), name
        service = services.get(pod["metadata"]["labels"][LABEL])
        if service:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("name", sorted(containers()))
def test_objkv_understands_the_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dict(of_kind("ConfigMap")["objkv"]["data"])
    for variable in containers()[name]["env"]:
        settings[variable["name"]] = variable.get("value", "from a secret")
    for variable, value in settings.items():
        monkeypatch.setenv(variable, value)
    config = load_config()
    assert config.bulk_url == "s3://my-kv-bucket/objkv"
    assert config.redis_password is not None
    # Only the sweeper of the night deletes, and only replicas save.
    account = pods()[name]["spec"]["serviceAccountName"]
    assert config.role == {"replica": "writer"}.get(account, account)


def test_objkv_has_the_commands() -> None:
    commands = {
        name: parsed(one["args"]) for name, one in containers().items() if "/objkv:" in one["image"]
    }
    assert commands == {
        "CronJob objkv-sweep": "sweep",
        "Deployment objkv-exporter": "exporter",
        "Job objkv-warm": "warm",
    }


def test_the_job_asks_the_service_of_the_replicas() -> None:
    arguments = containers()["Job objkv-warm"]["args"]
    asked = arguments[arguments.index("--endpoint") + 1]
    match = re.fullmatch(r"http://([\w-]+):(\d+)", asked)
    assert match is not None
    ports = of_kind("Service")[match[1]]["spec"]["ports"]
    assert int(match[2]) in {port["port"] for port in ports}


def test_what_is_not_a_replica_has_no_rights_that_it_does_not_need() -> None:
    for name, pod in pods().items():
        if name == "Deployment vllm":
            continue
        security = containers()[name]["securityContext"]
        assert pod["spec"]["securityContext"]["runAsNonRoot"], name
        assert security["readOnlyRootFilesystem"], name
        assert not security["allowPrivilegeEscalation"], name
        assert security["capabilities"] == {"drop": ["ALL"]}, name


def test_a_replica_may_finish_its_saves() -> None:
    """Workers' time is within the server's, and that within the pod's."""
    replica = container("Deployment vllm")
    told = [word for word in replica["args"] if word.startswith("--shutdown-timeout=")]
    server = int(told[0].partition("=")[2])
    workers = {v["name"]: v.get("value") for v in replica["env"]}
    grace = pods()["Deployment vllm"]["spec"]["terminationGracePeriodSeconds"]
    assert int(workers["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]) < server < grace


def test_no_secret_stands_in_a_file() -> None:
    for file in KUBERNETES.glob("*.yaml"):
        assert "kind: Secret" not in file.read_text()


def test_the_alerts_are_those_of_the_monitoring_example() -> None:
    (rule,) = of_kind("PrometheusRule").values()
    groups = yaml.safe_load((EXAMPLES / "monitoring" / "alerts.yml").read_text())["groups"]
    assert rule["spec"]["groups"] == groups, "run scripts/write_alerts_manifest.py"
