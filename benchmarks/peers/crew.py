"""Worker processes: which systems can take part, and requests to a worker with a timeout.

A peer that hangs is killed with all its children.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
END_S = 10.0
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
    """Whom of objkv's it is compared with; None if it is objkv's."""
    roles: tuple[str, ...] = ROLES

    def python(self) -> Path:
        """The interpreter of its environment."""
        if self.environment is None:
            return Path(sys.executable)
        return ROOT / ".cache" / "peers" / self.environment / "bin" / "python"

    def missing(self) -> str | None:
        """What to do before it can take part; None if nothing."""
        if self.python().exists():
            return None
        return f"not set up: run benchmarks/peers/setup.sh {self.environment}"


ENTRANTS = (
    Entrant("objkv-s3", ("objkv_worker.py", "s3")),
    Entrant("lmcache-s3", ("lmcache_worker.py", "s3"), "lmcache", "objkv-s3"),
    Entrant("lmcache-engine-s3", ("lmcache_worker.py", "s3", "engine"), "lmcache", "objkv-s3"),
    Entrant("nixl-obj", ("nixl_worker.py",), "nixl", "objkv-s3"),
    Entrant("mooncake-tcp", ("mooncake_worker.py",), "mooncake", "objkv-s3", ("server", *ROLES)),
    Entrant("objkv-redis", ("objkv_worker.py", "redis")),
    Entrant("lmcache-resp", ("lmcache_worker.py", "resp"), "lmcache", "objkv-redis"),
    Entrant(
        "lmcache-engine-resp", ("lmcache_worker.py", "resp", "engine"), "lmcache", "objkv-redis"
    ),
)


class Process:
    """One worker. Its stderr goes to a file."""

    def __init__(
        self, entrant: Entrant, role: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = f"{entrant.name} ({role})"
        self._log = folder / f"{entrant.name}-{role}.log"
        script, *arguments = entrant.command
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(entrant.python()), str(FOLDER / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,  # so that what it started can be ended with it
            )
        self._killed = False

    def ask(self, do: str, timeout_s: float, **asked: Any) -> dict[str, Any]:
        """Its answer. Raises ``PeerFailed``; after a time-out the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self._process.stdin.flush()
            answers = select.poll()
            answers.register(self._process.stdout, select.POLLIN)
            if not answers.poll(1000 * timeout_s):
                self.kill()
                raise PeerFailed(f"{self.name}: no answer to {do} in {timeout_s:g} s")
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self.kill()
            raise PeerFailed(f"{self.name}: ended at {do}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{self.name}: {do}: {answer['error']}")
        return answer

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let it end by itself if it does so soon."""
        if self.alive:
            with suppress(PeerFailed, subprocess.TimeoutExpired):
                self.ask("close", END_S)
                self._process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End it, and what it started. Idempotent."""
        if self._killed:  # its number may be another's by now
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"


class Crew:
    """All processes of one entrant. A context manager."""

    def __init__(self, entrant: Entrant, folder: Path, environment: Mapping[str, str]) -> None:
        self.entrant = entrant
        self._processes = {
            role: Process(entrant, role, folder, environment) for role in entrant.roles
        }

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.close()

    def ask_all(self, do: str, timeout_s: float, **asked: Any) -> None:
        """Ask every role in turn; ``open`` is told its role as well."""
        for role, process in self._processes.items():
            extra = {"role": role} if do == "open" else {}
            process.ask(do, timeout_s, **asked, **extra)

    def ask(self, role: str, do: str, timeout_s: float, **asked: Any) -> dict[str, Any]:
        """Ask one role."""
        return self._processes[role].ask(do, timeout_s, **asked)

    @property
    def alive(self) -> bool:
        """Whether all of them can be asked again."""
        return all(process.alive for process in self._processes.values())
