"""A replica's way to its agent. Imports no store and no index."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from objkv.agent.client import AgentCalls, AgentConnection, AgentRefused
from objkv.assembly.launch import IDLE_EXIT_S, failure_of, start_agent
from objkv.config import Config
from objkv.config.node import agent_environment, arena_bytes, replica_socket
from objkv.errors import ConfigError, TransferError

logger = logging.getLogger(__name__)
_START_S: Final = 30.0
"""How long a replica waits at its start for an agent that is being started."""
_PRIVATE_IDLE_S: Final = 30
"""A private agent ends after this time without a process of its replica."""
_POLL_S: Final = 0.05
_START_PAUSE_S: Final = 5.0
"""An agent needs a second to listen; on a busy machine each further start delays it."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What a private agent needs to know of its replica."""

    engine_id: str
    """vLLM's, which all processes of the replica know."""
    node_share: float = 1.0
    """The part of this machine's devices that the replica has."""


class AgentLink:
    """Connects to the agent, and starts one unless the settings name its socket. Thread-safe."""

    def __init__(self, config: Config, replica: Replica) -> None:
        """Does not wait."""
        self._config, self._replica = config, replica
        self._starts = config.agent in ("auto", "private")
        self._start_at = -math.inf
        self.calls = AgentCalls(self.connect)

    def shown(self) -> str:
        """Return the agent's socket, and the stores of one that is started. Without secrets."""
        place = f"unix://{replica_socket(self._config, self._replica.engine_id)}"
        public = self._config.public()
        stores = " bulk={bulk_url} index={index_url}".format_map(public) if self._starts else ""
        return place + stores

    def connect(self, *, wants_arena: bool = False, outbox: int = -1) -> AgentConnection:
        """Return a new connection. If no agent answers, tries to start one for the next attempt, in
        a folder that is checked each time, and raises ``TransferError``."""
        try:
            path = replica_socket(self._config, self._replica.engine_id)
            try:
                return AgentConnection(
                    path,
                    wants_arena=wants_arena,
                    outbox=outbox,
                    replica=self._replica.engine_id,
                    seals=self._config.seal_kinds,
                )
            except AgentRefused:
                raise
            except TransferError:
                self._start(path)
                raise
        except ConfigError as exc:
            raise TransferError(str(exc)) from exc

    def await_agent(self, seconds: float = _START_S) -> bool:
        """Wait at most ``seconds`` for an agent that this replica starts. Without one, which it
        returns and logs, nothing is cached. Raises ``ConfigError`` if ``at_start`` is strict."""
        end = monotonic() + seconds
        while True:
            try:
                self.connect().close()
                return True
            except TransferError as exc:
                reason, failure = exc, self._failure(exc)
                if failure is not None or not self._starts or monotonic() >= end:
                    break
            sleep(_POLL_S)
        why = failure or reason
        if self._config.at_start == "strict":
            raise ConfigError(f"no node agent, and at_start is strict: {why}")
        logger.warning("no node agent, caching nothing until one answers reason=%s", why)
        return False

    def _failure(self, error: TransferError) -> str | None:
        """Return why no agent will answer soon; None if one may."""
        if isinstance(error, AgentRefused) or isinstance(error.__cause__, ConfigError):
            return str(error)
        return failure_of(replica_socket(self._config, self._replica.engine_id))

    def _start(self, path: Path) -> None:
        """Start an agent if it is due, and none was just started. Raises ``ConfigError``."""
        now = monotonic()
        if now < self._start_at:
            return
        self._start_at = now + _START_PAUSE_S
        if self._config.agent == "auto":
            start_agent(path, agent_environment(self._config), IDLE_EXIT_S)
        elif self._config.agent == "private":
            nbytes = int(arena_bytes(self._config) * self._replica.node_share)
            settings = self._config.model_copy(update={"agent_memory_bytes": nbytes})
            start_agent(path, agent_environment(settings), _PRIVATE_IDLE_S)
