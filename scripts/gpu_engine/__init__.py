"""A real engine on a GPU, without objkv and with it: see README.md in this folder."""

import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What one engine runs."""

    shape: str = "1b"
    agent: str = ""
    """The setting; empty for an engine without objkv."""
    own_process: bool = False
    """Whether EngineCore has a process of its own, as with ``vllm serve``."""
    attention: str = ""
    """vLLM's name of the backend."""
    cpu: bool = False
    lengths: tuple[int, ...] = (4096, 16_384, 32_768)
    """Tokens of documents."""
    stage: str = ""
    folder: Path = Path()
    """Models are made here."""
    store: Path = Path()
    """Payloads and index."""


class Results:
    """One line of JSON per result, in a file that survives whatever ends the process."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage
        self.failed: list[str] = []

    def add(self, kind: str, **values: Any) -> None:
        """Append a result."""
        with self._path.open("a") as file:
            row = {"stage": self._stage, "kind": kind, **values}
            file.write(json.dumps(row, default=str) + "\n")

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Make an exception a result, so that the rest of the stage still runs. Raises it if
        nothing on the GPU can run any more."""
        try:
            yield
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:400]
            self.failed.append(what)
            self.add("error", what=what, error=text)
            if "CUDA error" in text or "EngineDead" in text:
                raise


def read(path: Path) -> list[Row]:
    """All results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def milliseconds(seconds: list[float]) -> Row:
    """Median, 99th percentile, and the largest."""
    if not seconds:
        return {"count": 0}
    values = sorted(round(1e3 * s, 3) for s in seconds)
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    median = round(statistics.median(values), 3)
    return {"count": len(values), "median_ms": median, "p99_ms": p99, "max_ms": values[-1]}


def table(rows: list[Row]) -> str:
    """All results but metrics, one a line."""
    lines = []
    for row in rows:
        if row["kind"] != "metrics":
            values = (f"{k}={v}" for k, v in row.items() if k not in ("stage", "kind", "answers"))
            lines.append(f"{row['stage']:9} {row['kind']:9} {' '.join(values)}"[:300])
    return "\n".join(lines)
