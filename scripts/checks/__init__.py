"""What is checked about the repository itself: ``findings`` and the functions of ``__main__`` yield
lines ``path:line: what is wrong and what to do``."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[Path]:
    """The files of the repository that match, new ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in sorted(set(listed.stdout.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


def line_of(text: str, position: int) -> int:
    """The number of the line at a position of a text."""
    return text.count("\n", 0, position) + 1


def name_of(path: Path) -> str:
    """A file's path from the root."""
    return path.relative_to(ROOT).as_posix()
