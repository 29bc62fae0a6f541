"""Check that a checkout can be released, and print its version.

    python scripts/check_release.py

Refuses uncommitted changes, and a tag, CHANGELOG.md and source that do not agree on the version.
Without a tag it reports on stderr what a tag would still need.
"""

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    """What git prints."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def unfit(version: str, changelog: str, names: dict[str, str]) -> list[str]:
    """What a tagged commit must not have."""
    faults = []
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.M):
        faults.append(f"CHANGELOG.md has no section for {version}")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    if unreleased and unreleased[1].strip():
        faults.append(f"CHANGELOG.md has entries under Unreleased: move them to {version}")
    if any("example.com" in name for name in names.values()):
        faults.append("pyproject.toml has the names of example.com: see docs/releasing.md")
    return faults


def problems(
    version: str, tags: list[str], dirty: str, stray: list[str], faults: list[str]
) -> list[str]:
    """Reasons to build nothing. ``tags``: those of this commit that begin with v."""
    found = [f"uncommitted changes:\n{dirty.rstrip()}"] if dirty else []
    if stray:
        found.append(f"run python scripts/set_names.py: {', '.join(stray)}")
    if tags and f"v{version}" not in tags:
        found.append(f"the tag is {tags[0]}, but objkv/__init__.py has {version}")
    return found + (faults if tags else [])


def main() -> None:
    """Raises ``SystemExit`` with the reasons if it refuses."""
    names = runpy.run_path(str(ROOT / "scripts/set_names.py"))
    version: str = names["version"](ROOT)
    tags = git("tag", "--points-at", "HEAD", "--list", "v*").split()
    faults = unfit(version, (ROOT / "CHANGELOG.md").read_text(), names["names"](ROOT))
    stray = [str(path.relative_to(ROOT)) for path, _ in names["changes"](ROOT)]
    found = problems(version, tags, git("status", "--porcelain"), stray, faults)
    if found:
        raise SystemExit("\n".join(f"release: {line}" for line in found))
    if not tags:
        for line in ["this commit has no tag: a trial build", *faults]:
            print(f"release: {line}", file=sys.stderr)
    print(version)


if __name__ == "__main__":
    main()
