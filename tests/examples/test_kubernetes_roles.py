"""The commands of the pods, on a real Valkey with the users of ``secrets.sh``."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import Result
from typer.testing import CliRunner

from objkv.assembly.backends import open_backends
from objkv.cli.app import app
from objkv.config import load_config
from objkv.errors import StoreError
from objkv.index.base import ReadIndex
from objkv.telemetry import NullRecorder
from tests.examples.places import KUBERNETES, ROOT, container, manifests, pods
from tests.services.access_roles import WORK
from tests.support.samples import NAMESPACE, save, save_identity
from tests.support.servers.fixtures import PATIENT
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KUBECTL = """\
#!/bin/sh
test "$1 $2" = "--namespace staging" || exit 1
case "$3 $4" in
  "get secret") test ! -f "$MADE/$5" || cat "$MADE/$5" ;;
  "create secret") echo "$6 ${7#*=}" ;;
  "apply -f") read -r name file && cp "$file" "$MADE/$name" ;;
  *) exit 1 ;;
esac
"""
"""Copies the files of secrets to the folder MADE."""


class Cluster:
    """Starts the commands of pods in this process, with the environment that they would have."""

    def __init__(self, folder: Path) -> None:
        self._here = {
            "OBJKV_BULK_URL": f"file://{folder}/bulk",
            "XDG_CACHE_HOME": str(folder / "home"),
            **{f"OBJKV_{name.upper()}": str(value) for name, value in PATIENT.items()},
        }
        self._settings = {
            one["metadata"]["name"]: one["data"] for one in manifests() if "data" in one
        }
        self._pods = pods()
        programs, made = folder / "bin", folder / "secrets"
        programs.mkdir(parents=True)
        made.mkdir()
        (programs / "kubectl").write_text(KUBECTL)
        (programs / "kubectl").chmod(0o755)
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        program = {"PATH": path, "PYTHONPATH": str(ROOT)}
        first: dict[str, str] = {}
        for keys in ({"OBJKV_S3_ACCESS_KEY_ID": "old=key"}, {"OBJKV_S3_SECRET_ACCESS_KEY": "new"}):
            subprocess.run(
                [str(KUBERNETES / "secrets.sh"), "staging"],
                env={**program, "MADE": str(made), "HOME": str(folder), **keys},
                check=True,
            )
            first = first or {file.name: file.read_text() for file in made.iterdir()}
        self.users = made / "valkey-users"
        assert self.users.read_text() == first[self.users.name], "a second run keeps passwords"
        self._secrets = {
            file.name: dict(line.split("=", 1) for line in file.read_text().splitlines())
            for file in made.iterdir()
            if file != self.users
        }
        given = self._secrets["objkv-writer"]
        assert (given["OBJKV_S3_ACCESS_KEY_ID"], given["OBJKV_S3_SECRET_ACCESS_KEY"]) == (
            "old=key",
            "new",
        )

    def use(self, server: RedisServer) -> None:
        self.server = server
        self._here["OBJKV_INDEX_URL"] = f"{server.url}/0"

    def environment(self, pod: str) -> dict[str, str]:
        """The variables of the container's ``envFrom``; only the addresses are local."""
        (container,) = self._pods[pod]["spec"]["containers"]
        settings, secret = container["envFrom"]
        given = self._settings[settings["configMapRef"]["name"]]
        return given | self._secrets[secret["secretRef"]["name"]] | self._here

    def run(self, pod: str, *more: str, words: list[str] | None = None) -> Result:
        (container,) = self._pods[pod]["spec"]["containers"]
        words = [*(words or container["args"]), *more]
        return CliRunner().invoke(app, words, env=self.environment(pod))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "kubernetes")
    arguments = container("Deployment valkey")["args"]
    arguments = [str(cluster.users) if "users.acl" in word else word for word in arguments]
    with valkey_server(tmp_path / "valkey", args=arguments) as server:
        cluster.use(server)
        yield cluster


def test_every_pod_does_its_work_as_its_user(cluster: Cluster) -> None:
    config = load_config(environ=cluster.environment("DaemonSet objkv-agent"))
    assert config.role == "writer"
    WORK["writer"](config)
    ran = cluster.run("Deployment objkv-exporter", "--once")
    assert ran.exit_code == 0, ran.output
    for end in ("index", "bulk"):
        assert re.search(rf'^objkv_up\{{.*"{end}".*\}} 1', ran.stdout, re.MULTILINE), ran.stdout
    for pod in ("CronJob objkv-sweep", "CronJob objkv-verify"):
        ran = cluster.run(pod)
        assert ran.exit_code == 0, ran.output
        assert json.loads(ran.stdout)["complete"], ran.stdout
    for pod in ("DaemonSet objkv-agent", "Job objkv-warm", "CronJob objkv-sweep"):
        ran = cluster.run(pod, words=["doctor", "--json"])
        assert (ran.exit_code, json.loads(ran.stdout)["verdict"]) == (0, "ok"), ran.output


def test_records_are_restored_whenever_valkey_starts_empty(
    cluster: Cluster, tmp_path: Path
) -> None:
    environment = cluster.environment("Deployment valkey-rebuild")
    with open_backends(load_config(environ=environment), NullRecorder()) as ends:
        save_identity(ends.bulk)
        hashes = [key.prefix_hash for key in save(ends.bulk, ends.index)]
        shell, place = container("Deployment valkey-rebuild"), urlsplit(cluster.server.url)
        command = [
            word.replace('"valkey", 6379', f'"{place.hostname}", {place.port}')
            for word in (*shell["command"], *shell["args"])
        ]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen(
                command,
                env=environment | {"PATH": path, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process,
        ):
            try:
                for _ in range(2):
                    cluster.server.kill()
                    cluster.server.start()
                    wait_until(lambda: are_found(ends.index, hashes))
            finally:
                os.killpg(process.pid, signal.SIGKILL)


def are_found(index: ReadIndex, hashes: list[bytes]) -> bool:
    """Whether the chunks have records; False while Valkey starts."""
    try:
        return None not in index.lookup(NAMESPACE, hashes)
    except StoreError:
        return False
