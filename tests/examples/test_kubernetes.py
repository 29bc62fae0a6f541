"""The manifests, by the schemas of the API, and by what they say of one another.

They are the chart's, as Helm renders them, and those of the files next to it.
"""

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from objkv import __version__
from objkv.config import Config, load_config
from objkv.config.schema import SECRET_SETTINGS
from tests.examples.commands import parsed
from tests.examples.places import (
    CHART,
    EXAMPLES,
    KUBERNETES,
    OVERLAY,
    ROOT,
    SETTINGS,
    container,
    documents,
    helm,
    manifests,
    pods,
    rendered,
)

SCHEMAS = json.loads((KUBERNETES.parents[1] / "tests/examples/operator_schemas.json").read_text())
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
        "enabled": True,
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
SET = f"--set-json=settings={json.dumps(SETTINGS)}"
ROLES = {"objkv-exporter": "reader", "objkv-sweep": "sweeper", "objkv-verify": "reader"}


VALKEY = "Deployment valkey"


def ours() -> dict[str, dict[str, Any]]:
    """The pods that use objkv."""
    return {name: pod for name, pod in pods().items() if name != VALKEY}


def containers() -> dict[str, dict[str, Any]]:
    """The one container of each pod."""
    return {name: container(name) for name in pods()}


def of_kind(kind: str, **values: Any) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in manifests(**values) if one["kind"] == kind}


def template(*words: str) -> str:
    """The output of Helm for the chart with the required settings and these words."""
    return helm("template", "objkv", str(CHART), SET, *words)


def test_there_is_all_that_a_fleet_needs() -> None:
    assert {one["kind"] for one in manifests()} == {
        *("ConfigMap", "ServiceAccount", "Deployment", "Service", "PodDisruptionBudget"),
        *("Job", "CronJob"),
    }
    more = {one["kind"] for one in manifests(**ALL)} - {one["kind"] for one in manifests()}
    assert more == {"Secret", "ServiceMonitor", "PrometheusRule", "NetworkPolicy", "DaemonSet"}


@pytest.mark.parametrize("values", [{}, ALL], ids=["default", "all"])
@pytest.mark.parametrize("version", VERSIONS)
def test_each_object_is_what_the_api_takes(values: dict[str, Any], version: str) -> None:
    for found in manifests(**values):
        if found["apiVersion"] == "monitoring.coreos.com/v1":
            Draft202012Validator(SCHEMAS[found["kind"]]).validate(found)
        else:
            kubernetes_validate.validate(found, version, strict=True)
        assert re.fullmatch(r"[a-z0-9-]+", found["metadata"]["name"])


def test_a_wrong_object_is_refused() -> None:
    """The schemas would notice: a name that is none, in each of the two ways of looking."""
    deployment = json.loads(json.dumps(of_kind("Deployment")["vllm"]))
    deployment["spec"]["template"]["spec"]["containers"][0]["port"] = 8000
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)
    monitor = json.loads(json.dumps(of_kind("ServiceMonitor", **ALL)["objkv-acme-1-vllm"]))
    monitor["spec"]["endpoints"][0]["interval"] = "often"
    assert not Draft202012Validator(SCHEMAS["ServiceMonitor"]).is_valid(monitor)


def test_helm_has_nothing_to_say() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), SET)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


def test_the_schema_has_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], found: dict[str, Any]) -> None:
        if "$ref" in found:
            found = schema["definitions"][found["$ref"].rpartition("/")[2]]
        if "properties" in found:
            assert set(values) == set(found["properties"]) - {"global"}
            assert found["additionalProperties"] is False
            for name, value in values.items():
                if isinstance(value, dict):
                    compare(value, found["properties"][name])

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema)


def test_secrets_belong_into_secrets() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = Draft202012Validator(schema["definitions"]["settings"]["propertyNames"])
    for name in Config.model_fields:
        is_valid = names.is_valid(f"OBJKV_{name.upper()}")
        assert is_valid == (name not in {*SECRET_SETTINGS, "role", "redis_prefix"}), name
    with pytest.raises(ValueError, match="OBJKV_REDIS_PASSWORD"):
        template("--set=settings.OBJKV_REDIS_PASSWORD=x")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--set=settings.OBJKV_INDEX_URL=",), "settings.OBJKV_INDEX_URL is required"),
        # Helm would print 1000000 as 1e+06.
        (("--set=settings.OBJKV_TTL_S=1000000",), "got number, want string"),
        (("--set=sweeep.enabled=false",), "sweeep"),
        (("--set=monitoring.alerts.kind=none,sweep.role=admin",), "sweep/role"),
    ],
)
def test_a_wrong_value_is_refused(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        template(*words)


def test_who_selects_finds() -> None:
    labels = {pod["metadata"]["labels"][LABEL] for pod in pods().values()}
    selected = [one["spec"]["selector"][LABEL] for one in of_kind("Service").values()]
    for kind in ("Deployment", "PodDisruptionBudget"):
        selectors = [one["spec"]["selector"] for one in of_kind(kind).values()]
        selected += [selector["matchLabels"][LABEL] for selector in selectors]
    assert set(selected) <= labels
    values = ALL | {"redisPrefix": "objkv"}
    services = {
        one["metadata"]["labels"][LABEL]: one for one in of_kind("Service", **values).values()
    }
    for monitor in of_kind("ServiceMonitor", **values).values():
        service = services[monitor["spec"]["selector"]["matchLabels"][LABEL]]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_ports_accounts_volumes_and_settings_are_there() -> None:
    services = of_kind("Service")
    for name, pod in ours().items():
        spec, one = pod["spec"], container(name)
        assert spec["serviceAccountName"] in of_kind("ServiceAccount"), name
        mounted = {mount["name"] for mount in one.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())}, name
        ports = {port["name"] for port in one.get("ports", ())}
        probes = [probe for key, probe in one.items() if key.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports, name
        settings, secret = one["envFrom"]
        assert settings["configMapRef"]["name"] in of_kind("ConfigMap"), name
        # One name for all that a role has.
        used = {spec["serviceAccountName"], settings["configMapRef"]["name"]}
        assert used == {secret["secretRef"]["name"]}, name
        service = services.get(pod["metadata"]["labels"][LABEL])
        if service:
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_objkv_understands_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pod in ours().items():
        account = pod["spec"]["serviceAccountName"]
        with monkeypatch.context() as environment:
            for variable, value in of_kind("ConfigMap")[account]["data"].items():
                environment.setenv(variable, value)
            config = load_config()
        assert config.bulk_url == "s3://my-kv-bucket/objkv"
        # Only the sweeper of the night deletes, and only replicas save.
        role = ROLES.get(pod["metadata"]["labels"][LABEL], "reader" if "warm" in name else "writer")
        assert config.role == role, name
        assert config.redis_username == account == f"objkv-{role}"


def test_a_role_has_its_own_settings_and_secret() -> None:
    settings = of_kind("ConfigMap", **ALL)["objkv-acme-1-sweeper"]["data"]
    assert settings["OBJKV_TTL_S"] == "7200"
    assert settings["OBJKV_REDIS_USERNAME"] == "objkv-Acme_1-sweeper"
    (one,) = of_kind("Secret", **ALL).items()
    assert (one[0], one[1]["stringData"]) == (
        "objkv-acme-1-writer",
        {"OBJKV_REDIS_PASSWORD": "not-so-secret"},
    )
    (sweep,) = pods(**ALL)["CronJob objkv-acme-1-sweep"]["spec"]["containers"]
    assert sweep["envFrom"][1] == {"secretRef": {"name": "elsewhere"}}
    alone = of_kind("ConfigMap", redisUsers=False)["objkv-writer"]["data"]
    assert "OBJKV_REDIS_USERNAME" not in alone


def test_objkv_has_the_commands() -> None:
    commands = {
        name: parsed(one["args"]) for name, one in containers().items() if "/objkv:" in one["image"]
    }
    assert commands == {
        "CronJob objkv-sweep": "sweep",
        "CronJob objkv-verify": "verify",
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


def seconds(words: list[str], environment: list[dict[str, Any]]) -> tuple[int, int]:
    """Time that workers have to complete saves, and the server."""
    (grace,) = (word for word in words if word.startswith("--shutdown-timeout="))
    workers = {v["name"]: v.get("value") for v in environment}
    return int(workers["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]), int(grace.partition("=")[2])


def test_a_replica_may_finish_its_saves() -> None:
    """Workers' time is within the server's, and that within the pod's."""
    replica = container("Deployment vllm")
    grace = pods()["Deployment vllm"]["spec"]["terminationGracePeriodSeconds"]
    workers, server = seconds(replica["args"], replica["env"])
    assert workers < server < grace
    (model,) = documents(OVERLAY)[0]["servingEngineSpec"]["modelSpec"]
    workers, server = seconds(model["vllmConfig"]["extraArgs"], model["env"])
    assert workers < server < 30, "Kubernetes' default: that chart sets no other"


def test_replicas_are_what_the_patch_would_make_of_them() -> None:
    given = of_kind("ConfigMap")["objkv-vllm"]["data"]
    patch = yaml.safe_load(given["patch.yaml"])["spec"]["template"]["spec"]
    pod = pods()["Deployment vllm"]["spec"]
    for name in ("serviceAccountName", "terminationGracePeriodSeconds", "volumes"):
        assert patch[name] == pod[name]
    (wanted,), (have,) = patch["containers"], pod["containers"]
    for name in ("name", "envFrom", "volumeMounts"):
        assert wanted[name] == have[name]
    assert wanted["env"][0] in have["env"]
    assert set(given["args"].splitlines()) < set(have["args"])
    assert have["command"][:2] == ["vllm", "serve"]


def test_the_production_stack_gets_the_writers_settings() -> None:
    """Rendered once by hand with that chart, which is not in this repository."""
    (model,) = documents(OVERLAY)[0]["servingEngineSpec"]["modelSpec"]
    assert model["serviceAccountName"] == model["envFromSecret"]["name"] == "objkv-writer"
    settings = of_kind("ConfigMap")["objkv-writer"]["data"]
    found = {}
    for one in model["env"]:
        if source := one.get("valueFrom", {}).get("configMapKeyRef"):
            assert (source["name"], source["key"]) == ("objkv-writer", one["name"])
            found[one["name"]] = source.get("optional", False)
    # A writer is what a replica is by default.
    assert set(settings) - {"OBJKV_ROLE"} <= set(found)
    assert {name for name, optional in found.items() if not optional} <= set(settings)
    assert model["vllmConfig"]["enablePrefixCaching"]
    assert "tensorParallelSize" in model["vllmConfig"]


def test_no_secret_stands_in_a_file() -> None:
    assert not of_kind("Secret")


def test_dashboard_and_alerts_are_those_of_the_monitoring_example() -> None:
    alerts = (EXAMPLES / "monitoring" / "alerts.yml").read_text()
    dashboard = (EXAMPLES / "monitoring" / "objkv-dashboard.json").read_text()
    made = of_kind("ConfigMap")
    assert made["objkv-alerts"]["data"]["alerts.yml"] == alerts
    assert made["objkv-dashboard"]["data"]["objkv-dashboard.json"] == dashboard
    (rule,) = of_kind("PrometheusRule", **ALL).values()
    assert rule["spec"] == yaml.safe_load(alerts)
    none = rendered(
        json.dumps(
            {
                "settings": SETTINGS,
                "monitoring": {"alerts": {"kind": "none"}, "dashboard": {"enabled": False}},
            }
        )
    )
    assert not {"objkv-alerts", "objkv-dashboard"} & {one["metadata"]["name"] for one in none}


def test_the_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (values,) = re.findall(r"^\{\"settings\".*?^\}\}$", page, re.MULTILINE | re.DOTALL)
    made = {
        f"{one['kind']} {one['metadata']['name']}".lower()
        for one in manifests(**json.loads(values))
    }
    short = {"deploy": "deployment"}
    names = re.findall(r"(deploy|deployment|cronjob|configmap)[/ ](objkv[\w-]+|vllm)\b", page)
    assert {f"{short.get(kind, kind)} {name}" for kind, name in names} <= made
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(r"`(monitoring\.[\w.]+)=", page):
        found = values
        for name in path.split("."):
            found = found[name]
