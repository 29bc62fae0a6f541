"""What an agent says about itself over HTTP: ``/healthz``, ``/metrics`` and ``GET /v1/status``."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from objkv.agent.http.metrics import metrics_page
from objkv.agent.messages import VERSION
from objkv.errors import ObjkvError, StoreUnavailable
from objkv.net.breaker import DIRECTIONS
from objkv.redact import printable, without_secrets
from objkv.telemetry import MemoryRecorder

if TYPE_CHECKING:  # doctor reads what an agent says, and needs no agent
    from objkv.agent.core import Core
    from objkv.agent.saves import NodeSaves
    from objkv.agent.server import AgentServer

_WARNINGS_MAX: Final = 10


@dataclass(frozen=True, slots=True)
class LoggedWarning:
    """A warning or an error in the agent's log."""

    at_s: float
    """Seconds since the epoch."""
    text: str


class RecentWarnings(logging.Handler):
    """Keeps the last warnings of objkv's loggers, without secrets."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: deque[LoggedWarning] = deque(maxlen=_WARNINGS_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = printable(without_secrets(record.getMessage()))
            self._found.append(LoggedWarning(record.created, text))
        except Exception:  # the arguments do not fit the format: report it as logging does
            self.handleError(record)

    def read(self) -> tuple[LoggedWarning, ...]:
        """Return the warnings, the oldest first."""
        return tuple(self._found)


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """A store or the index of an agent."""

    area: str
    """``bulk``, ``hot`` or ``index``."""
    url: str
    """Without secrets."""
    check: Callable[[], None]
    """Makes a round trip within a few seconds. Raises ``StoreError``."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What an agent's store or index has just answered."""

    area: str
    url: str
    error: str | None
    """Why it does not work, with the fix; None if it does."""
    kind: str | None
    """Name of the class of ``error``."""
    writes: int
    """Of all kinds, since the agent's start, with those that failed; of the index 0."""
    write_errors: int
    breakers_open: Sequence[str]
    """``read`` and ``write``: calls that are not made, because they kept failing."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """An agent at one moment. It contains no secrets."""

    version: str
    protocol: int
    """Version of the messages between agent and replicas."""
    role: str
    seals: Sequence[str]
    """How its payloads are sealed. Replicas with others are refused."""
    is_accepting: bool
    """Whether new replicas are served."""
    stores: Sequence[StoreStatus]
    clients: int
    """Connections of replicas. A replica has several."""
    memory_bytes: int
    """Of the arena, as the next two."""
    free_bytes: int
    leased_bytes: int
    disk_bytes: int | None
    """Bytes of payloads on its disk; None without one."""
    joins: int
    """Payloads that the ranks of a replica have handed over only in part so far."""
    held_back_payloads: int
    """Payloads that no store has so far."""
    held_back_bytes: int
    saves: dict[str, str]
    """What it puts to the bucket, and why, by namespace; of an empty name, of all."""
    warnings: Sequence[LoggedWarning]
    """The last ones of its log."""
    at_s: float


class NodeStatus:
    """Reads the state of one agent. Thread-safe."""

    def __init__(
        self,
        core: "Core",
        saves: "NodeSaves",
        server: "AgentServer",
        recorder: MemoryRecorder,
        *,
        role: str,
        stores: Sequence[StoreCheck],
        warnings: RecentWarnings,
    ) -> None:
        self._core, self._saves, self._server, self._recorder = core, saves, server, recorder
        self._role, self._stores, self._warnings = role, stores, warnings

    def health(self) -> str:
        """Return a text, or raise ``StoreUnavailable`` if the thread for new replicas has ended."""
        if not self._server.is_accepting:
            raise StoreUnavailable("this agent serves no new replicas: restart it")
        return "ok\n"

    def metrics(self) -> str:
        """Return the page for Prometheus."""
        arena_cache = self._core.arena_cache
        levels: dict[str, float] = {
            "arena_bytes": arena_cache.total_bytes,
            "arena_free_bytes": arena_cache.free_bytes,
            "leased_bytes": arena_cache.leased_bytes(),
            "leased_payloads": arena_cache.leased(),
            "resident_payloads": len(arena_cache),
            "unsaved_payloads": len(arena_cache.held_back),
            "unsaved_bytes": arena_cache.held_back.nbytes,
            "prefetch_unread_bytes": arena_cache.unread_bytes,
            "clients": self._server.clients,
        }
        if (spill := self._core.spill) is not None:
            levels["disk_bytes"] = spill.disk.nbytes
            levels["disk_max_bytes"] = spill.disk.nbytes_max
            levels["disk_payloads"] = len(spill.disk)
        return metrics_page(levels, self._recorder.read(), self._saves.policy.decisions())

    def read(self) -> AgentStatus:
        """Return the state. Makes a call to each store, and waits for it."""
        arena_cache, spill = self._core.arena_cache, self._core.spill
        return AgentStatus(
            version=metadata.version("objkv"),
            protocol=VERSION,
            role=self._role,
            seals=self._server.seals,
            is_accepting=self._server.is_accepting,
            stores=[self._read_store(one) for one in self._stores],
            clients=self._server.clients,
            memory_bytes=arena_cache.total_bytes,
            free_bytes=arena_cache.free_bytes,
            leased_bytes=arena_cache.leased_bytes(),
            disk_bytes=None if spill is None else spill.disk.nbytes,
            joins=len(self._saves.joins),
            held_back_payloads=len(arena_cache.held_back),
            held_back_bytes=arena_cache.held_back.nbytes,
            saves={name: str(one) for name, one in self._saves.policy.decisions().items()},
            warnings=self._warnings.read(),
            at_s=time.time(),
        )

    def _read_store(self, one: StoreCheck) -> StoreStatus:
        error = kind = None
        try:
            one.check()
        except ObjkvError as exc:
            error, kind = str(exc), type(exc).__name__
        area, value = one.area, self._recorder.value
        opened = [name for name in DIRECTIONS if value(f"breaker_open_{area}_{name}")]
        writes, errors = int(value(f"{area}_writes")), int(value(f"{area}_write_errors"))
        return StoreStatus(area, one.url, error, kind, writes, errors, opened)
