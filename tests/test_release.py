"""What ``make release-check`` would notice in a wheel or an sdist; that it runs is its own test."""

import io
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import objkv
from objkv.errors import pip_install

ROOT = Path(__file__).parents[1]
INFO = f"objkv-{objkv.__version__}.dist-info"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/check_wheel.py"))


def entries(script: dict[str, Any]) -> dict[str, bytes]:
    """What a right wheel has; contents do not matter."""
    points = "\n".join(script["ENTRY_POINTS"]).encode()
    metadata = f"Name: objkv\nVersion: {objkv.__version__}\n\nWhat it is.\n".encode()
    own = {"METADATA": metadata, "entry_points.txt": points, "licenses/LICENSE": b""}
    return dict.fromkeys(script["package_files"](), b"") | {
        f"{INFO}/{name}": content for name, content in own.items()
    }


def wheel_of(folder: Path, entries: dict[str, bytes]) -> Path:
    wheel = folder / "objkv.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return wheel


def sdist_of(folder: Path, names: set[str]) -> Path:
    sdist = folder / "objkv.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"objkv-{objkv.__version__}/{name}"), io.BytesIO())
    return sdist


def test_a_whole_wheel_is_fine(script: dict[str, Any], tmp_path: Path) -> None:
    whole = entries(script)
    wheel = wheel_of(tmp_path, whole)
    assert script["check_wheel"](wheel, objkv.__version__) == len(whole)


@pytest.mark.parametrize("name", ["objkv/py.typed", "objkv/cli/app.py", f"{INFO}/licenses/LICENSE"])
def test_a_wheel_that_lacks_a_file_is_refused(
    script: dict[str, Any], tmp_path: Path, name: str
) -> None:
    lacking = entries(script)
    del lacking[name]
    with pytest.raises(SystemExit, match="release-check"):
        script["check_wheel"](wheel_of(tmp_path, lacking), objkv.__version__)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tests/test_release.py", b""),
        (f"{INFO}/entry_points.txt", b"objkv = objkv.cli.__main__:main"),
        (f"{INFO}/METADATA", b"Version: 0.0.1\n\nWhat it is.\n"),
        (f"{INFO}/METADATA", f"Version: {objkv.__version__}\n".encode()),
    ],
)
def test_a_wheel_with_something_else_is_refused(
    script: dict[str, Any], tmp_path: Path, name: str, content: bytes
) -> None:
    wheel = wheel_of(tmp_path, entries(script) | {name: content})
    with pytest.raises(SystemExit, match="release-check"):
        script["check_wheel"](wheel, objkv.__version__)


def test_an_sdist_has_the_whole_package_and_no_tests(
    script: dict[str, Any], tmp_path: Path
) -> None:
    check, files = script["check_sdist"], script["package_files"]()
    assert check(sdist_of(tmp_path, files), objkv.__version__) == len(files)
    for wrong in (files - {"objkv/py.typed"}, files | {"tests/conftest.py"}):
        with pytest.raises(SystemExit, match="release-check"):
            check(sdist_of(tmp_path, wrong), objkv.__version__)


def test_the_version_has_a_section_in_the_changelog(script: dict[str, Any]) -> None:
    assert script["source_version"]() == objkv.__version__


@pytest.fixture(scope="module")
def release() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/check_release.py"))


NAMES = {"image": "images.test/acme/objkv"}
READY = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2030-01-01\n\n- Something.\n"


def test_a_commit_whose_tag_changelog_and_source_agree_can_be_released(
    release: dict[str, Any],
) -> None:
    assert release["unfit"]("1.2.3", READY, NAMES) == []
    assert release["problems"]("1.2.3", ["v1.2.3"], "", [], []) == []


@pytest.mark.parametrize(
    ("version", "changelog", "names", "words"),
    [
        ("1.2.4", READY, NAMES, "no section for 1.2.4"),
        ("1.2.3", READY.replace("d]\n", "d]\n\n- More.\n"), NAMES, "under Unreleased"),
        ("1.2.3", READY, {"image": "registry.example.com/objkv"}, "example.com"),
    ],
)
def test_a_tag_is_refused_until_changelog_and_names_are_right(
    release: dict[str, Any], version: str, changelog: str, names: dict[str, str], words: str
) -> None:
    (fault,) = release["unfit"](version, changelog, names)
    assert words in fault
    assert release["problems"](version, [f"v{version}"], "", [], [fault]) == [fault]
    assert release["problems"](version, [], "", [], [fault]) == [], "a trial build needs no tag"


def test_changed_files_wrong_tags_and_stray_names_are_refused(release: dict[str, Any]) -> None:
    problems = release["problems"]
    assert problems("1.2.3", [], " M README.md\n", [], []) == ["uncommitted changes:\n M README.md"]
    assert "the tag is v1.2.4" in problems("1.2.3", ["v1.2.4"], "", [], [])[0]
    assert "set_names.py: README.md" in problems("1.2.3", [], "", ["README.md"], [])[0]


def test_the_advice_to_install_an_extra_needs_no_objkv_from_a_registry() -> None:
    # As the messages print it. --no-index: pip may not look anything up.
    command = pip_install("encryption").replace("'", "").split()[1:]
    pip = [sys.executable, "-m", "pip", *command, "--dry-run", "--no-index"]
    ran = subprocess.run(pip, capture_output=True, text=True, cwd="/")
    assert ran.returncode == 0, ran.stderr
    assert "Requirement already satisfied: cryptography" in ran.stdout
