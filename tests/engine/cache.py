"""Scenarios: functions that run replicas, whose results are kept until something changes.

    @scenario
    def one_prefix_twice(folder: Path) -> dict[str, Result]:
        job = Job(steps=(Generate(prompts=(PROMPT,)),), env={"OBJKV_BULK_URL": f"file://{folder}"})
        return {"first": run_replica(job, folder), "second": run_replica(job, folder)}

    def test_the_second_replica_loads_what_the_first_saved() -> None:
        assert one_prefix_twice()["second"].cached == [256]

A scenario gets a fresh folder and returns ``Result`` and plain JSON values by name; further
arguments, JSON values too, make different scenarios. It must depend on nothing but its arguments,
its own file, the harness and objkv, and its tests must look only at what it returned: in an
unchanged checkout on an unchanged machine its result is then read from ``.cache/engine``, as
``pytest`` announces. ``pytest --fresh`` replays nothing. A scenario that raised is never kept, nor
one of a file in which a test failed: what its replicas left in its folder stays, or their logs.
"""

import hashlib
import inspect
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from tests.engine.harness import ROOT
from tests.engine.job import Result

P = ParamSpec("P")
Values = dict[str, Any]
CACHE = ROOT / ".cache" / "engine"
_RESULT = "__result__"
_SERVERS = ("redis-server", "valkey-server", "radosgw")


@dataclass
class Ledger:
    """What happened to the scenarios that this process was asked for."""

    replay: bool = True
    fresh: int = 0
    replayed: int = 0
    known: dict[str, Values | Exception] = field(default_factory=dict)
    files: dict[str, set[Path]] = field(default_factory=dict)
    """The kept results of the scenarios of each test file."""
    folders: dict[str, set[Path]] = field(default_factory=dict)
    """Where the logs of this run's scenarios are, by test file."""
    distrusted: set[str] = field(default_factory=set)
    """Test files of which nothing is kept any more."""

    def forget(self, test_file: Path) -> None:
        """Keep no result of this file's scenarios: one of its tests failed."""
        self.distrusted.add(str(test_file))
        for kept in self.files.pop(str(test_file), ()):
            kept.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove the logs of the scenarios that all tests liked."""
        for source, folders in self.folders.items():
            if source not in self.distrusted:
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)


LEDGER = Ledger()


@dataclass(frozen=True)
class Kept:
    """Where a scenario's newest result is kept, and the digest it must carry to be replayed."""

    file: Path
    digest: str
    source: str
    """The scenario's own file."""


def scenario(function: Callable[Concatenate[Path, P], Values]) -> Callable[P, Values]:
    """Make ``function(folder, ...)`` a scenario: callable without the folder, run when needed."""
    source = Path(inspect.getfile(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Values:
        name = json.dumps([source.name, function.__name__, args, kwargs])
        if name not in LEDGER.known:
            asked = hashlib.sha256(name.encode()).hexdigest()[:8]
            kept = Kept(CACHE / f"{function.__name__}-{asked}.json", _digest(source), str(source))
            LEDGER.files.setdefault(str(source), set()).add(kept.file)
            LEDGER.known[name] = _replay(kept) or _run(function, kept, args, kwargs)
        known = LEDGER.known[name]
        if isinstance(known, Exception):
            raise known
        return known

    return call


def _replay(kept: Kept) -> Values | None:
    if not LEDGER.replay or not kept.file.exists():
        return None
    found = json.loads(kept.file.read_text(), object_hook=_revived)
    if found["digest"] != kept.digest:
        return None
    LEDGER.replayed += 1
    values: Values = found["values"]
    return values


def _run(function: Any, kept: Kept, args: Any, kwargs: Any) -> Values | Exception:
    """The scenario's values, or what it raised, so that its other tests do not run it again."""
    LEDGER.fresh += 1
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"objkv-{function.__name__}-"))
    try:
        values: Values = function(folder, *args, **kwargs)
    except Exception as exc:  # Whatever it is, each test that needs the scenario fails with it.
        exc.add_note(f"what the replicas left is in {folder}")
        return exc
    _keep_logs(folder)
    LEDGER.folders.setdefault(kept.source, set()).add(folder)
    if kept.source in LEDGER.distrusted:
        return values
    partial = kept.file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"digest": kept.digest, "values": values}, default=_plain))
    partial.rename(kept.file)
    return values


def _keep_logs(folder: Path) -> None:
    """All but the logs is large. A process that was killed may still be dying in there."""
    with suppress(OSError):
        _keep_logs_of(sorted(folder.rglob("*"), reverse=True))  # what a folder holds before it


def _keep_logs_of(paths: list[Path]) -> None:
    for path in paths:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path.suffix != ".log":
                path.unlink()


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        return {_RESULT: value.model_dump(mode="json")}
    raise TypeError(f"a scenario returns results and JSON values, not {value!r}")


def _revived(value: dict[str, Any]) -> Any:
    return Result.model_validate(value[_RESULT]) if _RESULT in value else value


def _digest(source: Path) -> str:
    """Of everything that a scenario's result may depend on, besides its arguments."""
    digest = hashlib.sha256(_surroundings())
    settings = {key: value for key, value in os.environ.items() if key.startswith("OBJKV_")}
    digest.update(json.dumps(settings, sort_keys=True).encode())
    digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


@cache
def _surroundings() -> bytes:
    digest = hashlib.sha256()
    for path in _files():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    installed = sorted(f"{dist.name}=={dist.version}" for dist in distributions())
    digest.update(json.dumps([installed, platform.python_version(), _machine()]).encode())
    return digest.digest()


def _files() -> Iterator[Path]:
    """objkv and the harness. One test file's change does not make another's scenarios run."""
    yield from sorted((ROOT / "objkv").rglob("*.py"))
    yield from (p for p in sorted((ROOT / "tests/engine").rglob("*.py")) if p.stem[:5] != "test_")


def _machine() -> list[str]:
    """What of this machine reaches a result: the instructions that kernels choose by, servers."""
    flags: list[str] = []
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        line = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
        flags = sorted({flag for flag in line.split() if flag.startswith(("avx", "amx", "fma"))})
    servers = [Path(found) for name in _SERVERS if (found := shutil.which(name))]
    sizes = [f"{server} {server.stat().st_size}" for server in servers]
    return [platform.machine(), str(os.cpu_count()), *flags, *sizes]
