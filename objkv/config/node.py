"""The node: its memory, where its agent listens, and which settings an agent's replicas share."""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Final

from objkv.config.schema import Config
from objkv.config.sources import CONFIG_FILE_VARIABLE, ENV_PREFIX
from objkv.config.urls import local_path
from objkv.errors import ConfigError

_REPLICAS_OWN: Final = frozenset(
    {
        *("agent", "chunk_tokens", "codec", "load_mode", "save_decode", "model_id"),
        *("weights_epoch", "weights_digest", "vllm_patches", "pinned_bytes_max", "store_tokens"),
        *("lookup_deadline_ms", "load_deadline_ms", "step_load_deadline_ms", "save_deadline_ms"),
        *("encoder_deadline_ms", "drain_deadline_ms", "load_queue_max", "save_queue_max"),
        *("lookup_queue_max", "admission", "at_start", "load_failure", "agent_verify"),
    }
)
"""Settings that replicas of one agent may have different."""
_BINDS_THREADS: Final = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables by which OpenMP, which vLLM preloads, binds a process to the cores of one worker."""
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_CORES = Path("/sys/fs/cgroup/cpu.max")
_PATH_BYTES_MAX = 70
"""A socket's path may have 107, 30 of them for its name."""
_PRIVATE = "private-"
_MEMORY_SHARE = 8
"""Divisor: the default arena is this fraction of the machine's memory."""


def agent_socket(config: Config) -> Path | None:
    """Return where the agent for these settings listens; None if each replica has its own.

    With ``auto``, replicas have an agent in common if they would use the same stores with the same
    credentials and keys. Raises ``ConfigError`` if the folder of the socket belongs to another
    user.
    """
    if config.agent == "private":
        return None
    if config.agent != "auto":
        return local_path(config.agent)
    kept = config.model_dump(mode="json", exclude=set(_REPLICAS_OWN))
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    text = json.dumps([kept, aws], sort_keys=True)
    return _own_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.sock"


def replica_socket(config: Config, engine_id: str) -> Path:
    """Return where the agent of a replica listens. Raises ``ConfigError`` like ``agent_socket``."""
    path = agent_socket(config)
    if path is not None:
        return path
    return _own_folder() / f"{_PRIVATE}{hashlib.sha256(engine_id.encode()).hexdigest()[:16]}.sock"


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


def _own_folder() -> Path:
    """Return a folder of this user, with a short path, that is gone after a restart."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) / "objkv" if given else None
    if folder is None or len(os.fsencode(folder)) > _PATH_BYTES_MAX:
        folder = Path("/tmp") / f"objkv-{os.geteuid()}"  # noqa: S108 # its owner is checked
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise ConfigError(
            f"no folder {folder} for the agent's socket ({exc}): set XDG_RUNTIME_DIR to one"
        ) from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} is not a private folder of this user: make it one, or set XDG_RUNTIME_DIR"
        )
    return folder


def host_bytes() -> int:
    """Return the memory of this machine, or of this container if that is less."""
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(nbytes, int(_CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return nbytes


def arena_bytes(config: Config) -> int:
    """Return the size of an agent's arena."""
    return config.agent_memory_bytes or host_bytes() // _MEMORY_SHARE


def host_cores() -> int:
    """Return how many cores this process may use at once: those of the machine or container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = map(int, _CONTAINER_CORES.read_text().split())
    except (OSError, ValueError):  # no such file, or "max"
        return cores or 1
    return max(1, min(cores or 1, quota // period))
