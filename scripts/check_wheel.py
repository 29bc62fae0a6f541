"""Check that a wheel and an sdist hold all of the package, and nothing else.

python scripts/check_wheel.py WHEEL SDIST
"""

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import set_names

ROOT = Path(__file__).parents[1]
ENTRY_POINTS = ("objkv = objkv.cli.__main__:main", "objkv = objkv.connector.plugin:register")
WHEEL_BYTES_MAX = 5 << 18
NEVER = re.compile(
    r"^(tests|benchmarks|scripts|terraform)/|testing/servers/|__pycache__|\.pyc$|\.orig$|~"
)


def wrong_in(wheel: Path, sdist: Path, version: str) -> dict[str, object]:
    """What is wrong, by what it is about."""
    files = (path for path in (ROOT / "objkv").rglob("*") if path.is_file())
    package = {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
    info = f"objkv-{version}.dist-info"
    section = "Unreleased" if "dev" in version else version
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    with tarfile.open(sdist) as tar:
        packed = {m.name.removeprefix(f"objkv-{version}/") for m in tar if m.isfile()}
    return {
        "files that differ from the package": {n for n in names if info not in n} ^ package,
        "files that the sdist lacks": package - packed,
        "files of no package": [*filter(NEVER.search, names), *filter(NEVER.search, packed)],
        "files that the wheel lacks": {"objkv/py.typed", f"{info}/licenses/LICENSE"} - names,
        "entry points that it lacks": [line for line in ENTRY_POINTS if line not in points],
        "too many bytes": wheel.stat().st_size > WHEEL_BYTES_MAX,
        "another version": metadata["Version"] != version,
        "no description": not metadata.get_payload(),
        "no section of CHANGELOG.md": f"## [{section}]" not in (ROOT / "CHANGELOG.md").read_text(),
    }


def main(wheel: Path, sdist: Path) -> None:
    """Raises ``SystemExit`` with what is wrong."""
    wrong = wrong_in(wheel, sdist, set_names.version(ROOT))
    faults = [f"{what}: {one}" for what, one in wrong.items() if one]
    if faults:
        raise SystemExit(f"{wheel.name}: " + "; ".join(faults))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
