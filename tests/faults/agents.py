"""A node agent over S3 and SQLite, whose replica has nothing else, and what can be done to it."""

import os
import shutil
import signal
import tempfile
from contextlib import closing, suppress
from http.client import HTTPException
from pathlib import Path
from threading import Event

from objkv.agent.client import AgentConnection, ArenaLease
from objkv.agent.memory.arena import CellState
from objkv.agent.messages import Claims, Urgency
from objkv.assembly.backends import open_bulk
from objkv.codec.payload import Claim
from objkv.config import load_config
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import NullRecorder
from tests.faults.places import BODIES, Fault, Place, Servers
from tests.support.agents import AgentProcess
from tests.support.samples import CHUNK, NAMESPACE, save
from tests.support.servers.process import freeze, has_ended
from tests.support.servers.spoil import Spoil
from tests.support.waiting import wait_for

PATIENCE_S = 60.0
ARENA_BYTES = 1 << 20
"""Room for all payloads of the toy engine that a test makes."""
LARGE_ARENA_BYTES = 16 << 20
"""The same where payloads are large, so that many are saved at once."""
STORE_S = 4
"""How long an agent's calls to its store may take."""
HASTY = {"failures": 1, "reset_s": 0.01, "reset_max_s": 0.02}
"""When its breakers open, and let one call through."""
LEASE_MS = 1_000
"""How long nobody saves again what an agent was saving when it was killed."""
FROZEN_S = 0.3
"""How long this process's clients wait for an agent that cannot answer, instead of two seconds."""
_FILLERS = 4
"""Payloads opened at once until the arena is full."""
_WIDTH = 8192
"""Of large fillers: each has 1 MiB."""


class AgentPlace(Place):
    def __init__(
        self, servers: Servers, *, arena_bytes: int = ARENA_BYTES, processes: int = 0
    ) -> None:
        """``processes``: with which the agent fetches."""
        super().__init__(servers, "s3")
        self._sockets = Path(tempfile.mkdtemp(prefix="objkv-", dir="/tmp"))
        self._stores = self.settings | {"index_url": f"sqlite://{self.index_file}"}
        own = {
            "agent_memory_bytes": arena_bytes,
            "codec": "none",
            "save_to_bucket": "all",
            "load_deadline_ms": 1000 * STORE_S,
            "save_deadline_ms": 600_000,
            "drain_deadline_ms": 10_000,
        }
        self._agent_settings = {name: str(value) for name, value in (self._stores | own).items()}
        self._processes = processes
        self._fillers: list[Claim] = []
        self._held = 0
        self._is_frozen = False
        self.agent = self._start()
        nowhere = {"bulk_url": "file:///nowhere/chunks", "index_url": "sqlite:///nowhere/index"}
        self.settings = {"agent": self.agent.url} | nowhere

    def _start(self) -> AgentProcess:
        constants = {
            "objkv.assembly.fetchers.process_count": self._processes,
            "objkv.assembly.backends.BreakerLimits": HASTY,
            "objkv.assembly.agent.LEASE_MS": LEASE_MS,
            "objkv.assembly.agent.LOOKUP_TTL_S": 0.0,
        }
        path = self._sockets / "agent.sock"
        return AgentProcess(self._agent_settings, path=path, constants=constants)

    @property
    def is_serving(self) -> bool:
        return not self._is_frozen and self.agent.process.poll() is None

    def close(self) -> None:
        self.agent.__exit__(None, None, None)
        shutil.rmtree(self._sockets)
        super().close()

    def empty(self) -> None:
        """Leave nothing in the arena: another agent has taken over."""
        self.agent.end()
        self._renew()
        if self._processes:
            self._use_process()

    def _use_process(self) -> None:
        """Fetch payloads of others until a process gets them. The arena never has all of them."""
        self._fillers = self._fillers or self._store_fillers(width=_WIDTH)
        with closing(self._client()) as other:

            def is_used() -> bool:
                for one in self._fillers:
                    leases = _opened(other, [one])
                    other.release([lease.number for lease in leases])
                return self.numbers()["agent_fetch_process_gets"] > 0

            assert wait_for(is_used, bound_s=PATIENCE_S), self.agent.log()

    def settle(self) -> None:
        """Wait until an agent that answers has saved what it took, or failed to."""

        def is_done() -> bool:
            levels = self._metrics()
            return not levels or levels["leased_payloads"] == self._held

        assert wait_for(is_done, bound_s=PATIENCE_S), self.agent.log()

    def numbers(self) -> dict[str, float]:
        """What the agent counted since its start, as ``agent_<name>``; nothing if it is away."""
        found = self._metrics().items()
        return {
            f"agent_{name.removesuffix('_total')}": value
            for name, value in found
            if name.endswith("_total")
        }

    def _metrics(self) -> dict[str, float]:
        if not self.is_serving:
            return {}
        try:
            return self.agent.metrics()
        except (OSError, HTTPException):
            wait_for(lambda: not self.is_serving)
            assert not self.is_serving, self.agent.log()
            return {}

    def prepare(self, name: str) -> None:
        """Have payloads of others stored that can fill the arena."""
        if name == "agent-full" and not self._fillers:
            self._fillers = self._store_fillers()

    def _store_fillers(self, width: int = 8) -> list[Claim]:
        """Store more payloads than the arena has room for; what to open."""
        nbytes = int(self._agent_settings["agent_memory_bytes"])
        tokens = range(CHUNK * (nbytes // max(4096, 128 * width) + 1))
        stores = load_config(self._stores)
        with (
            closing(open_bulk(stores, NullRecorder())) as bulk,
            closing(SqliteIndex(self.index_file)) as index,
        ):
            keys = save(bulk, index, tokens, width=width)
            records = index.lookup(NAMESPACE, [key.prefix_hash for key in keys])
        assert None not in records
        return [
            _claim(key, record.parent_hash, number)
            for number, (key, record) in enumerate(zip(keys, records, strict=True))
            if record is not None
        ]

    def _renew(self) -> None:
        shutil.rmtree(self.agent.folder)
        self.agent = self._start()

    def _revive(self) -> None:
        if self.agent.process.poll() is not None:
            self._renew()

    def _agent_killed(self) -> Fault:
        self.agent.kill()
        yield
        self._revive()

    def _agent_killed_busy(self) -> Fault:
        """It dies when it asks S3 for a payload, or puts one."""
        agent, is_killed = self.agent, Event()

        def kill() -> None:
            is_killed.set()
            agent.kill()

        self.servers.spoil_s3.spoil(Spoil("hook", BODIES, hook=kill))
        yield
        self.servers.spoil_s3.mend()
        if is_killed.is_set():  # ``poll`` knows nothing while the proxy's thread waits for it
            agent.process.wait(PATIENCE_S)
        self._revive()

    def _agent_frozen(self) -> Fault:
        self.agent.freeze()
        self._is_frozen = True
        self.servers.agent_sockets.hurry(FROZEN_S)
        yield
        self.servers.agent_sockets.hurry()
        self.agent.process.send_signal(signal.SIGCONT)
        self._is_frozen = False

    def _agent_unlinked(self) -> Fault:
        """What is connected stays so. After a while the agent has another socket there."""
        away = self._sockets / "away"
        self.agent.path.rename(away)
        yield
        with suppress(FileExistsError):  # to replace the agent's new socket would end it
            os.link(away, self.agent.path)
        away.unlink()

    def _agent_full(self) -> Fault:
        """Another client has leases of all that there is room for."""
        with closing(self._client()) as holder:
            for at in range(0, len(self._fillers), _FILLERS):
                leases = _opened(holder, self._fillers[at : at + _FILLERS])
                states = [_state(holder, one.cell) for one in leases]
                self._held += len(leases)
                if CellState.FAILED in states:
                    break
            assert CellState.FAILED in states, "there is still room"
            yield
        self._held = 0

    def _client(self) -> AgentConnection:
        return AgentConnection(self.agent.path, wants_arena=True, call_s=PATIENCE_S)

    def _agent_process_killed(self) -> Fault:
        """Each dies when it asks S3 for a payload."""

        def kill() -> None:
            for pid in self.agent.fetchers():
                os.kill(pid, signal.SIGKILL)

        return self._spoiled_by(self.servers.spoil_s3, Spoil("hook", frozenset({"GET"}), hook=kill))

    def _agent_process_frozen(self) -> Fault:
        """It never goes on if it got something to fetch: the agent ends it."""
        frozen = [pid for pid in self.agent.fetchers() if not has_ended(pid)]
        for pid in frozen:
            freeze(pid)
        before = self.numbers()["agent_fetch_process_gets"]
        yield
        if self.numbers()["agent_fetch_process_gets"] > before:
            assert wait_for(lambda: all(map(has_ended, frozen)), bound_s=PATIENCE_S)
        else:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)


def _claim(key: ChunkKey, parent_hash: bytes, number: int) -> Claim:
    return Claim(key, parent_hash, number * CHUNK, (number + 1) * CHUNK)


def _opened(client: AgentConnection, wanted: list[Claim]) -> list[ArenaLease]:
    leases = client.open(Claims.of(wanted), deadline_s=PATIENCE_S, urgency=Urgency.BETWEEN_STEPS)
    for lease in leases:
        _state(client, lease.cell)
    return leases


def _state(holder: AgentConnection, cell: int) -> CellState:
    def state() -> CellState:
        return holder.arena.board.read(cell).state

    assert wait_for(lambda: state() is not CellState.FILLING, bound_s=PATIENCE_S)
    return state()
