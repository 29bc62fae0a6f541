"""The node: its memory, where its agent listens, and which settings an agent's replicas share."""

import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from objkv.config.schema import Config
from objkv.config.sources import CONFIG_FILE_VARIABLE, ENV_PREFIX
from objkv.config.urls import local_path, make_private
from objkv.errors import ConfigError

_REPLICAS_OWN: Final = frozenset(
    {
        *("agent", "chunk_tokens", "load_mode", "save_decode", "model_id"),
        *("weights_epoch", "weights_digest", "vllm_patches", "pinned_bytes_max", "store_tokens"),
        *("lookup_deadline_ms", "load_deadline_ms", "step_load_deadline_ms", "save_deadline_ms"),
        *("drain_deadline_ms", "admission", "at_start", "agent_verify"),
    }
)
"""Settings that replicas of one agent may have different."""
_BINDS_THREADS: Final = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables by which OpenMP, which vLLM preloads, binds a process to the cores of one worker."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_SHARED_FOLDER = Path("/tmp")  # noqa: S108 # the owner of what is in it is checked
_KEY = "names"
_PATH_BYTES_MAX = 70
"""A socket's path may have 107, 30 of them for its name."""
_PRIVATE = "private-"
_MEMORY_SHARE = 8
"""Divisor: the default arena is this fraction of the machine's memory."""


def agent_socket(config: Config) -> Path | None:
    """Return where the agent for these settings listens; None if each replica has its own. Raises
    ``ConfigError`` without a private folder for the socket.

    With ``auto``, replicas share an agent if AWS's variables and all settings but ``_REPLICAS_OWN``
    are the same.
    """
    if config.agent == "private":
        return None
    if config.agent != "auto":
        return local_path(config.agent)
    kept = config.model_dump(mode="json", exclude=set(_REPLICAS_OWN))
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    return _own_socket("", json.dumps([kept, aws], sort_keys=True))


def replica_socket(config: Config, engine_id: str) -> Path:
    """Return where the agent of a replica listens. Raises ``ConfigError`` like ``agent_socket``."""
    return agent_socket(config) or _own_socket(_PRIVATE, engine_id)


def is_private(path: Path) -> bool:
    """Whether the agent that listens at ``path`` is that of one replica."""
    return path.name.startswith(_PRIVATE)


def http_path(path: Path) -> Path:
    """Return where the agent that listens at ``path`` answers HTTP."""
    return Path(f"{path}.http")


def agent_environment(config: Config) -> dict[str, str]:
    """Return the environment of an agent with these settings, whatever sources they came from."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    for name in (CONFIG_FILE_VARIABLE, *_BINDS_THREADS):
        environ.pop(name, None)
    for name in sorted(config.model_fields_set - {"agent"}):
        value = getattr(config, name)
        if value is not None:
            environ[ENV_PREFIX + name.upper()] = str(value)
    return environ


def _own_socket(prefix: str, text: str) -> Path:
    """Return the socket for ``text``. Every user sees its name, and cannot guess the text from it,
    by a random key in the folder: a link, which is made in one step."""
    folder = _own_folder()
    with open_private(folder) as place:
        try:
            with suppress(FileExistsError):
                os.symlink(secrets.token_hex(), _KEY, dir_fd=place)
            key = os.fsencode(os.readlink(_KEY, dir_fd=place))
        except OSError as exc:
            raise ConfigError(f"no socket for an agent in {folder}: {exc}") from exc
    return folder / f"{prefix}{hmac.digest(key, text.encode(), 'sha256').hex()[:16]}.sock"


@contextmanager
def open_private(folder: Path) -> Iterator[int]:
    """Open a folder in which only this user can see and change files."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(
            f"no folder {folder} for the agent's socket ({exc}): set XDG_RUNTIME_DIR to one"
        ) from exc
    try:
        found = os.fstat(place)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{folder} is not a private folder of this user: make it one, or set "
                "XDG_RUNTIME_DIR"
            )
        yield place
    finally:
        os.close(place)


def _own_folder() -> Path:
    """Return a folder for sockets, with a short path, that is gone after a restart."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given or "/") / "objkv"
    if given and len(os.fsencode(folder)) <= _PATH_BYTES_MAX and _is_own(folder.parent):
        with suppress(OSError):  # such as below /run/user, after a logout
            make_private(folder)
            return folder
    folder = _SHARED_FOLDER / f"objkv-{os.geteuid()}"
    with suppress(OSError):  # opening it shows why
        make_private(folder)
    return folder


def _is_own(folder: Path) -> bool:
    """Whether only this user can change what is in ``folder``, or it can be made so. It is
    another's after ``su`` and ``sudo -E``."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def host_bytes() -> int:
    """Return the memory of this machine, or of this container if that is less."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([nbytes, *_container_limits()])


def _container_limits() -> Iterator[int]:
    """Return the limits of this process's control groups and of their parents, in both versions."""
    with suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, kinds, name = line.split(":", 2)
            if kinds not in ("", "memory"):
                continue
            root = _CGROUPS / kinds
            folder = root / name.lstrip("/")
            for place in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # no such file, or "max"
                    file = "memory.limit_in_bytes" if kinds else "memory.max"
                    yield int((place / file).read_text())
                if place == root:
                    break


def arena_bytes(config: Config) -> int:
    """Return the size of an agent's arena."""
    return config.agent_memory_bytes or host_bytes() // _MEMORY_SHARE


def host_cores() -> int:
    """Return how many cores this process may use at once: those of the machine or container."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = map(int, (_CGROUPS / "cpu.max").read_text().split())
        cores = max(1, min(cores, quota // period))
    return cores
