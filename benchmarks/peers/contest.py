"""The entrants with their processes, and the rounds, in which all move the same values in turn.

An entrant of which a request fails takes no further part; one that hangs is killed with all its
children.
"""

import hashlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
LOOKUP_BYTES, LOOKUP_CHUNKS = 64 << 10, 128
START_S, END_S = 120.0, 10.0
"""Until a worker has imported what it needs, on a busy machine, and until one has ended."""
ROLES = ("writer", "reader")


class PeerFailed(Exception):
    """A worker answered with an error, wrong bytes or not at all."""


@dataclass(frozen=True)
class Entrant:
    """One thing to compare."""

    name: str
    command: tuple[str, ...]
    """The worker's script in this folder (or its path), and arguments."""
    environment: str | None = None
    """Of ``setup.sh``; None for objkv's own interpreter."""
    rival: str | None = None
    """Which of objkv's it is compared with; None if it is objkv's."""
    roles: tuple[str, ...] = ROLES

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        if self.environment is None:
            return Path(sys.executable)
        return FOLDER.parents[1] / ".cache" / "peers" / self.environment / "bin" / "python"


LMCACHE = "lmcache_worker.py"
ENTRANTS = (
    Entrant("objkv-s3", ("objkv_worker.py", "s3")),
    Entrant("lmcache-s3", (LMCACHE, "s3"), "lmcache", "objkv-s3"),
    Entrant("lmcache-engine-s3", (LMCACHE, "s3", "engine"), "lmcache", "objkv-s3"),
    Entrant("nixl-obj", ("nixl_worker.py",), "nixl", "objkv-s3"),
    Entrant("mooncake-tcp", ("mooncake_worker.py",), "mooncake", "objkv-s3", ("server", *ROLES)),
    Entrant("objkv-redis", ("objkv_worker.py", "redis")),
    Entrant("lmcache-resp", (LMCACHE, "resp"), "lmcache", "objkv-redis"),
    Entrant("lmcache-engine-resp", (LMCACHE, "resp", "engine"), "lmcache", "objkv-redis"),
)


class Process:
    """One worker. Its stderr goes to a file. A context manager."""

    def __init__(self, entrant: Entrant, role: str, folder: Path, more: Mapping[str, str]) -> None:
        self._name = f"{entrant.name} ({role})"
        self._log = folder / f"{entrant.name}-{role}.log"
        script, *arguments = entrant.command
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(entrant.python), str(FOLDER / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **more},
                start_new_session=True,  # so that what it started can be ended with it
            )

    def ask(self, do: str, timeout_s: float, **asked: Any) -> dict[str, Any]:
        """Its answer. Raises ``PeerFailed``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self._process.stdin.flush()
            answers = select.poll()
            answers.register(self._process.stdout, select.POLLIN)
            if not answers.poll(1000 * timeout_s):
                raise PeerFailed(f"{self._name}: no answer to {do} in {timeout_s:g} s")
            line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise PeerFailed(f"{self._name}: ended at {do}: {''.join(last)[:300]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self._name}: {do}: {answer['error']}")
        return answer

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *failure: object) -> None:
        """Let it end by itself if it does so soon; then end it, and what it started."""
        with suppress(PeerFailed, subprocess.TimeoutExpired):
            self.ask("close", END_S)
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass
class Crew:
    """All processes of one entrant, by their roles."""

    entrant: Entrant
    processes: dict[str, Process]
    stack: ExitStack
    """Ends them."""

    def ask_all(self, do: str, timeout_s: float, **asked: Any) -> None:
        """Ask every role in turn."""
        for process in self.processes.values():
            process.ask(do, timeout_s, **asked)


@dataclass
class Row:
    """One operation of one entrant, on values of one size."""

    entrant: str
    rival: str | None
    what: str
    nbytes: int
    """Moved in a round; 0 for lookups."""
    seconds: list[float] = field(default_factory=list)
    """A round each, until the entrant failed."""

    def median(self) -> str:
        """MB/s, or ms for lookups."""
        if not self.seconds:
            return "-"
        median = statistics.median(self.seconds)
        return f"{self.nbytes / 1e6 / median:.0f} MB/s" if self.nbytes else f"{1e3 * median:.2f} ms"


@dataclass
class Result:
    """Of a whole run."""

    rows: list[Row] = field(default_factory=list)
    out: dict[str, str] = field(default_factory=dict)
    """Which entrants did not take part, or not to the end, and why."""

    def ratio(self, row: Row) -> float | None:
        """How many times as fast objkv was: the median over rounds of this row's seconds to those
        of its rival in the same round."""
        rivals = [r for r in self.rows if r.entrant == row.rival and r.what == row.what]
        pairs = zip(row.seconds, rivals[0].seconds, strict=False) if rivals else ()
        ratios = [a / b for a, b in pairs]
        return statistics.median(ratios) if ratios else None


@dataclass(frozen=True)
class Contest:
    """All entrants that can take part, from the first round to the last."""

    servers: dict[str, Any]
    clear: Callable[[], None]
    """Empties the servers."""
    sizes: tuple[tuple[int, int], ...]
    """(bytes of a value, how many at once)."""
    rounds: int
    threads: int
    timeout_s: float
    """For one request to one worker."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of every worker."""
    result: Result = field(default_factory=Result)

    def run(self, entrants: Sequence[Entrant]) -> Result:
        """All sizes, then lookups."""
        crews: list[Crew] = []
        with ExitStack() as stack:
            for entrant in entrants:
                if not entrant.python.exists():
                    setup = f"not set up: run benchmarks/peers/setup.sh {entrant.environment}"
                    self.result.out[entrant.name] = setup
                    continue
                crews.append(Crew(entrant, {}, stack.enter_context(ExitStack())))
                with self._in_or_out(crews, crews[-1]):
                    self._open(crews[-1])
            for value_bytes, values in self.sizes:
                self._rounds(crews, value_bytes, values, lookups=False)
            self._rounds(crews, LOOKUP_BYTES, LOOKUP_CHUNKS, lookups=True)
        return self.result

    def _open(self, crew: Crew) -> None:
        folder, opened = Path(self.servers["folder"]), {"threads": self.threads}
        for role in crew.entrant.roles:
            process = Process(crew.entrant, role, folder, self.environment)
            crew.processes[role] = crew.stack.enter_context(process)
            process.ask("open", START_S, role=role, servers=self.servers, **opened)

    @contextmanager
    def _in_or_out(self, crews: list[Crew], crew: Crew) -> Iterator[None]:
        """An entrant that fails here is out."""
        try:
            yield
        except PeerFailed as exc:
            self.result.out[crew.entrant.name] = str(exc)
            crews.remove(crew)
            crew.stack.close()

    def _rounds(self, crews: list[Crew], value_bytes: int, values: int, *, lookups: bool) -> None:
        rows: dict[str, list[Row]] = {}
        moves = [f"{verb}, {value_bytes / 2**20:g} MiB" for verb in ("put", "get")]
        nbytes = value_bytes * values
        if lookups:
            moves, nbytes = [f"lookup of {values} chunks"], 0
        for crew in list(crews):
            name, rival = crew.entrant.name, crew.entrant.rival
            with self._in_or_out(crews, crew):
                crew.ask_all("prepare", START_S, value_bytes=value_bytes, values=values)
            rows[name] = [Row(name, rival, what, nbytes) for what in moves]
            self.result.rows += rows[name]
        for number in range(self.rounds + 1):
            print(f"{value_bytes >> 10} KiB, round {number} of {self.rounds}", file=sys.stderr)
            for crew in list(crews):
                name = crew.entrant.name
                texts = (f"{name}/{value_bytes}/{number}/{i}" for i in range(values))
                names = [hashlib.sha1(text.encode()).hexdigest() for text in texts]  # noqa: S324
                with self._in_or_out(crews, crew):
                    seconds = self._turn(crew, names, number, lookups=lookups)
                    if number:  # the first one warms up
                        for row, one in zip(rows[name], seconds, strict=True):
                            row.seconds.append(one)
                self.clear()

    def _turn(self, crew: Crew, names: list[str], seed: int, *, lookups: bool) -> list[float]:
        """Seconds of put and get, or of the lookup. Raises ``PeerFailed``."""
        writer, reader = crew.processes["writer"], crew.processes["reader"]
        put = writer.ask("put", self.timeout_s, names=names, seed=seed)
        got = reader.ask("lookup" if lookups else "get", self.timeout_s, names=names)
        if lookups and got["found"] != len(names):
            raise PeerFailed(f"a lookup found {got['found']} of {len(names)}")
        if not lookups and got["digests"] != put["digests"]:
            raise PeerFailed("a get brought other bytes than were put")
        crew.ask_all("clear", self.timeout_s)
        return [got["seconds"]] if lookups else [put["seconds"], got["seconds"]]
