"""Checks what is in a wheel and in an sdist: all of the package, and nothing else.

python scripts/check_wheel.py WHEEL SDIST REBUILT; REBUILT is the wheel that the sdist makes.
"""

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "objkv"
ENTRY_POINTS = ("objkv = objkv.cli.__main__:main", "objkv = objkv.connector.plugin:register")
WHEEL_BYTES_MAX = 5 << 18
NEVER = (
    "tests/",
    "testing/servers/",
    "benchmarks/",
    "scripts/",
    "terraform/",
    ".pyc",
    "__pycache__",
    ".orig",
    "~",
)


def package_files() -> set[str]:
    """Everything below ``objkv/`` that is not made by running it."""
    files = (path for path in SOURCE.rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def check(holds: bool, sentence: str) -> None:
    """End with ``sentence`` unless it holds."""
    if not holds:
        raise SystemExit(f"release-check: {sentence}")


def check_wheel(wheel: Path, version: str) -> int:
    """The number of files in it."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"objkv-{version}.dist-info"
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    inside = {name for name in names if not name.startswith(info)}
    check(inside == package_files(), f"{wheel.name} differs: {inside ^ package_files()}")
    wrong = {name for name in names if any(part in name for part in NEVER)}
    check(not wrong, f"{wheel.name} has {sorted(wrong)[:5]}")
    check(
        wheel.stat().st_size <= WHEEL_BYTES_MAX,
        f"{wheel.name} is longer than {WHEEL_BYTES_MAX} bytes",
    )
    check("objkv/py.typed" in inside, f"{wheel.name} has no py.typed")
    for line in ENTRY_POINTS:
        check(line in entry_points, f"{wheel.name} lacks the entry point {line}")
    check(f"{info}/licenses/LICENSE" in names, f"{wheel.name} has no licence")
    check(metadata["Version"] == version, f"{wheel.name} says version {metadata['Version']}")
    check(bool(metadata.get_payload()), f"{wheel.name} has no description")
    return len(names)


def check_sdist(sdist: Path, version: str) -> int:
    """The number of files in it."""
    with tarfile.open(sdist) as archive:
        top = f"objkv-{version}/"
        names = {member.name.removeprefix(top) for member in archive if member.isfile()}
    check(package_files() <= names, f"{sdist.name} lacks {package_files() - names}")
    wrong = {name for name in names for part in NEVER if part in f"{name}"}
    wrong -= package_files()
    check(not wrong, f"{sdist.name} has {sorted(wrong)[:5]}")
    return len(names)


def source_version() -> str:
    """The one place where it stands."""
    found = re.search(r'^__version__ = "(.+)"$', (SOURCE / "__init__.py").read_text(), re.MULTILINE)
    check(found is not None, "objkv/__init__.py has no __version__")
    assert found is not None
    changelog = (ROOT / "CHANGELOG.md").read_text()
    check(f"## [{found[1]}]" in changelog, f"CHANGELOG.md has no section for {found[1]}")
    return found[1]


def main(wheel: Path, sdist: Path, rebuilt: Path) -> None:
    """Raises ``SystemExit`` with a sentence about the first thing that is wrong."""
    version = source_version()
    counts = check_wheel(wheel, version), check_sdist(sdist, version)
    check(wheel.read_bytes() == rebuilt.read_bytes(), "the sdist makes another wheel")
    sizes = (f"{file.stat().st_size >> 10} KiB" for file in (wheel, sdist))
    files = (f"{count} files" for count in counts)
    in_wheel, in_sdist = (f"{n} ({size})" for n, size in zip(files, sizes, strict=True))
    print(f"version {version}; {in_wheel} in the wheel, {in_sdist} in the sdist")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
