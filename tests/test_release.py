"""What ``make release-check`` would notice in a wheel or an sdist; that it runs is its own test."""

import io
import runpy
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import objkv

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
