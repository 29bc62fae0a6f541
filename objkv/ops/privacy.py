"""Whether other users of this machine can reach what is stored on it. Looks at modes only.

Whoever can write payloads or records can have replicas compute with them, unless they are sealed;
whoever can read them learns about prompts. A folder that objkv makes by itself is private.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from objkv.config import Config, local_path
from objkv.ops.probes import Area, Check

_READABLE = "every user of this machine can read it; KV tells much of the prompts it was made of"


def check_privacy(config: Config) -> list[Check]:
    """One check for each end that is a folder or a file that is there; a warning where others may
    write."""
    checks: list[Check] = []
    if config.bulk_url.startswith("file:"):
        checks += _look("bulk", local_path(config.bulk_url), ())
    if config.index_url.startswith("sqlite:"):
        file = local_path(config.index_url)
        checks += _look("index", file.parent, (file, *_companions(file)))
    return checks


def _look(area: Area, folder: Path, files: tuple[Path, ...]) -> Iterator[Check]:
    """What others may do with ``files``, or with all that is in ``folder``."""
    try:
        modes = {path: path.stat().st_mode for path in (folder, *files) if path.exists()}
        reached = all(_may_enter(parent) for parent in folder.resolve().parents)
    except OSError:  # the other checks say what is wrong
        return
    if folder not in modes:
        return
    reached = reached and bool(modes[folder] & stat.S_IXOTH)
    open_to_all = {path for path, mode in modes.items() if reached and mode & stat.S_IWOTH}
    if open_to_all:
        shown = ", ".join(str(path) for path in sorted(open_to_all))
        detail = f"every user of this machine may write to {shown}"
        fix = f"chmod o-w {' '.join(map(str, sorted(open_to_all)))}"
        yield Check(area, "privacy", "warning", detail, fix)
        return
    looked_at = [modes[path] for path in files or (folder,) if path in modes]
    readable = reached and any(mode & stat.S_IROTH for mode in looked_at)
    yield Check(area, "privacy", "ok", _READABLE if readable else "other users cannot reach it")


def _companions(file: Path) -> Iterator[Path]:
    for suffix in ("-wal", "-shm"):
        yield file.with_name(file.name + suffix)


def _may_enter(folder: Path) -> bool:
    return bool(os.stat(folder).st_mode & stat.S_IXOTH)
