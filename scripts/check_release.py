"""Check that a checkout can be released, and print its version.

    python scripts/check_release.py

Refuses uncommitted changes, and a tag, CHANGELOG.md and source that do not agree on the version.
Without a tag it reports on stderr what a tag would still need.
"""

import re
import subprocess
import sys
from pathlib import Path

import set_names

ROOT = Path(__file__).resolve().parents[1]


def git(*words: str) -> str:
    """What git prints."""
    command = ["git", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def main() -> None:
    """Raises ``SystemExit`` with the reasons if it refuses."""
    version, names, stray = set_names.version(ROOT), set_names.names(ROOT), set_names.changes(ROOT)
    tags = git("tag", "--points-at", "HEAD", "--list", "v*").split()
    refused = [f"run python scripts/set_names.py: {path.name}" for path, _ in stray]
    if dirty := git("status", "--porcelain"):
        refused.append(f"uncommitted changes:\n{dirty.rstrip()}")
    if tags and f"v{version}" not in tags:
        refused.append(f"the tag is {tags[0]}, but objkv/__init__.py has {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    faults = []
    if not re.search(rf"^## \[{re.escape(version)}\]", changelog, re.M):
        faults.append(f"CHANGELOG.md has no section for {version}")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    if unreleased and unreleased[1].strip():
        faults.append(f"CHANGELOG.md has entries under Unreleased: move them to {version}")
    if any("example.com" in name for name in names.values()):
        faults.append("pyproject.toml has the names of example.com: see docs/releasing.md")
    if refused or (tags and faults):
        raise SystemExit("\n".join(f"release: {line}" for line in refused + faults))
    if not tags:
        for line in ["this commit has no tag: a trial build", *faults]:
            print(f"release: {line}", file=sys.stderr)
    print(version)


if __name__ == "__main__":
    main()
