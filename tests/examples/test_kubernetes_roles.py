"""The commands of the pods, on a real Valkey with the users that Terraform makes, or with those of
``secrets.sh``; ``default`` is off.

The chart is rendered with Terraform's output ``helm_values``. That the document here is this output
is a test of Terraform's (``terraform/aws/tests``); the rights are those of its module.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from objkv.assembly.backends import open_backends
from objkv.cli.app import app
from objkv.config import load_config
from objkv.telemetry import NullRecorder
from scripts.write_rights import FILE
from tests.examples.places import KUBERNETES, ROOT, container, manifests, pods
from tests.ops.warm.fake_vllm import FakeVllm, Place
from tests.services.access_roles import WORK
from tests.support.samples import TOKENS
from tests.support.servers.fixtures import PATIENT
from tests.support.servers.redis import RedisServer, valkey_server

pytestmark = pytest.mark.slow

OUTPUTS = json.loads((ROOT / "terraform" / "aws" / "tests" / "chart.json").read_text())
VALUES: dict[str, Any] = OUTPUTS["helm_values"]
USERS: dict[str, str] = OUTPUTS["users"]
"""Names by role. A secret of the same name holds the password."""
INDEX = ROOT / "terraform" / "modules" / "index" / "main.tf"


KUBECTL = """\
#!/bin/sh
test "$1 $2 $3 $4 $5" = "--namespace staging create secret generic" || exit 1
case "$7" in
  --from-env-file=*) cp "${7#*=}" "$MADE/$6" ;;
  --from-file=*) mkdir "$MADE/$6" && cp "${7#*=}" "$MADE/$6" ;;
  *) exit 1 ;;
esac
"""
"""Copies the files of secrets to the folder MADE."""


class Cluster:
    """Starts the commands of pods in this process, with the environment that they would have."""

    def __init__(
        self, server: RedisServer, folder: Path, secrets: dict[str, dict[str, str]]
    ) -> None:
        self._here = {
            "OBJKV_BULK_URL": f"file://{folder}/bulk",
            "OBJKV_INDEX_URL": f"{server.url}/0",
            "XDG_CACHE_HOME": str(folder / "home"),
            **{f"OBJKV_{name.upper()}": str(value) for name, value in PATIENT.items()},
        }
        self._settings = {
            one["metadata"]["name"]: one["data"] for one in manifests(**VALUES) if "data" in one
        }
        self._secrets = secrets
        self._pods = pods(**VALUES)

    def environment(self, pod: str) -> dict[str, str]:
        """The variables of the container's ``envFrom``; only the addresses are local."""
        (container,) = self._pods[pod]["spec"]["containers"]
        settings, secret = container["envFrom"]
        given = self._settings[settings["configMapRef"]["name"]]
        return given | self._secrets[secret["secretRef"]["name"]] | self._here

    def run(self, pod: str, *more: str, words: list[str] | None = None, **other: str) -> Result:
        """Run the pod's own command, or these words in it."""
        (container,) = self._pods[pod]["spec"]["containers"]
        environment = self.environment(pod) | other
        return CliRunner().invoke(app, [*(words or container["args"]), *more], env=environment)


def made_by_script(folder: Path) -> dict[str, dict[str, str]]:
    """Run ``secrets.sh``: the secrets by name. Valkey's users are a file of ``valkey-users``."""
    programs, made = folder / "bin", folder / "secrets"
    programs.mkdir(parents=True)
    made.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(KUBERNETES / "secrets.sh"), "staging"],
        env={"PATH": path, "MADE": str(made), "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {
        file.name: dict(line.split("=", 1) for line in file.read_text().splitlines())
        for file in made.iterdir()
        if file.is_file()
    }


@contextmanager
def with_terraforms_users(folder: Path) -> Iterator[Cluster]:
    rights = json.loads(FILE.read_text())["access_strings"]
    (default_user,) = re.findall(
        r'"default"\n.*?access_string = "([^"]+)"', INDEX.read_text(), re.S
    )
    with valkey_server(folder / "valkey") as server:
        admin = server.client()
        secrets = {}
        for role, name in USERS.items():
            words = rights[role]["single"].replace("${redis_prefix}", VALUES["redisPrefix"]).split()
            password = f"{role}-0123456789"
            admin.execute_command("ACL", "SETUSER", name, "reset", f">{password}", *words)
            secrets[name] = {"OBJKV_REDIS_PASSWORD": password}
        admin.execute_command("ACL", "SETUSER", "default", "reset", *default_user.split())
        yield Cluster(server, folder, secrets)


@contextmanager
def with_the_scripts_users(folder: Path) -> Iterator[Cluster]:
    secrets = made_by_script(folder)
    file = folder / "secrets" / "valkey-users" / "users.acl"
    arguments = [
        str(file) if "users.acl" in w else w for w in container("Deployment valkey")["args"]
    ]
    with valkey_server(folder / "valkey", args=arguments) as server:
        yield Cluster(server, folder, secrets)


@pytest.fixture(scope="module", params=[with_terraforms_users, with_the_scripts_users])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with request.param(tmp_path_factory.mktemp("kubernetes")) as cluster:
        yield cluster


def test_every_pod_does_its_work_as_its_user(cluster: Cluster, tmp_path: Path) -> None:
    place = {"OBJKV_BULK_URL": f"file://{tmp_path}/bulk"}
    config = load_config(environ=cluster.environment("Deployment vllm") | place)
    assert config.role == "writer"
    WORK["writer"](config)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(list(TOKENS)))
    writer = load_config(environ=cluster.environment("Deployment vllm"))
    with (
        open_backends(writer, NullRecorder()) as stores,
        FakeVllm(Place(stores.bulk, stores.index)) as server,
    ):
        words = ["warm", str(prompts), "--endpoint", server.url, "--json"]
        first, second = (cluster.run("Job objkv-warm", words=words) for _ in range(2))
    assert (first.exit_code, json.loads(first.stdout)["warmed"]) == (0, 1), first.output
    assert json.loads(second.stdout)["stored_before"] == 1

    ran = cluster.run("Deployment objkv-exporter", "--once")
    assert ran.exit_code == 0, ran.output
    for end in ("index", "bulk"):
        assert re.search(rf'^objkv_up\{{.*"{end}".*\}} 1', ran.stdout, re.MULTILINE), ran.stdout
    for pod in ("CronJob objkv-sweep", "CronJob objkv-verify"):
        ran = cluster.run(pod)
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.stdout)["complete"], ran.stdout
    for pod in ("Deployment vllm", "Job objkv-warm", "CronJob objkv-sweep"):
        ran = cluster.run(pod, words=["doctor", "--json"])
        assert (ran.exit_code, json.loads(ran.stdout)["verdict"]) == (0, "ok"), ran.output
    # As it was with one secret for all roles and no name.
    ran = cluster.run("CronJob objkv-sweep", OBJKV_REDIS_USERNAME="")
    assert ran.exit_code != 0
    assert "redis_username" in ran.stderr
