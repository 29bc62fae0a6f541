"""Runs a node agent: its arena, its core, and its socket, over stores and index."""

import hashlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from threading import Lock
from time import monotonic, time

from objkv.agent.answering import NodeCalls, NodeLookups
from objkv.agent.core import Core, CoreLimits
from objkv.agent.disk import Disk, DiskFolder
from objkv.agent.http.api import AgentHttp
from objkv.agent.http.listener import check_address
from objkv.agent.http.status import NodeStatus, RecentWarnings, StoreCheck
from objkv.agent.memory.answers import VOUCH_S, AnswerBoard
from objkv.agent.memory.arena import PAGE, Arena
from objkv.agent.prefetch import Prefetches
from objkv.agent.saves import NodeSaveLimits, NodeSaves
from objkv.agent.server import AgentServer
from objkv.assembly.backends import check_backends, is_far, open_backends, open_room, within
from objkv.assembly.launch import AgentRuns, AgentSocket
from objkv.assembly.seal import open_seal
from objkv.background import JOIN_S
from objkv.cache.chunks import LEASE_MS, CacheSettings, ChunkCache
from objkv.cache.lookup import LOOKUP_TTL_S
from objkv.cache.worth import PutPolicy, PutRule
from objkv.config import Config
from objkv.config.node import arena_bytes, host_bytes, http_path
from objkv.config.urls import local_path, parse_address
from objkv.errors import ConfigError, StoreUnavailable
from objkv.telemetry import FailureLog, MemoryRecorder, Recorder

logger = logging.getLogger(__name__)
_SAVE_QUEUE_MAX = 1024
"""Saves that may wait: 64 each of 16 workers. Those of 32 MiB fill an arena's quarter earlier."""
_SAVERS_EACH, _FAR_SAVERS_EACH = 2, 8
"""Threads that save for each that loads, to a folder and to a bucket. A put is one request, and S3
takes 85 MB/s on a connection. With fewer, new chunks are dropped (``docs/scaling.md``)."""
_LOOK_S = 1.0
_CHECK_S = 5.0
"""How long a store may take to answer before its status says that it does not."""
_TOTALS = (
    *("agent_hits", "agent_fills", "agent_disk_hits"),
    *("load_bytes", "saves", "save_bytes", "agent_evictions"),
)
"""The counters in the last line of the log, in its order."""
_SWITCH_S = 5e-4
"""How long a thread keeps the interpreter while another waits for it. Lookups take microseconds,
and would wait for Python's usual 5 ms behind threads that fetch."""


def _lease_owner(path: Path) -> str:
    """Return the owner of an agent's leases: the same after a restart, which need not wait until
    they expire. Two agents of a replacement have it: what both save is sent twice, and stored
    once."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        # Containers may have the same host name, and the same path in other folders.
        boot += os.readlink("/proc/self/ns/mnt")
    except OSError:
        boot = ""
    place = hashlib.sha256(f"{boot}\n{path.absolute()}".encode()).hexdigest()[:16]
    return f"{socket.gethostname()}:{place}:agent"


def in_time(check: Callable[[], None]) -> Callable[[], None]:
    """Return a check that ends in time. While one hangs, no further one begins."""
    running = Lock()

    def run() -> None:
        with running:
            check()

    def checked() -> None:
        if running.locked():
            raise StoreUnavailable("an earlier check has not ended yet")
        within(_CHECK_S, run)

    return checked


class NodeAgent(AbstractContextManager["NodeAgent"]):
    """An agent that serves a socket until it is closed."""

    def __init__(
        self, config: Config, path: Path, recorder: MemoryRecorder, *, replace: bool = False
    ) -> None:
        """``replace``: take over the path once this one can start. Raises ``AgentRuns`` if another
        one serves it, ``ConfigError``, and with ``at_start`` strict ``StoreError``."""
        self._config, self._path, self._rule = config, path, PutRule.of(config)
        self._failure_log = FailureLog(logger, "connections of new clients")
        self._open(path, recorder, replace)
        policy = PutPolicy(self._rule)
        self.saves = NodeSaves(self._cache, self.core, self._save_limits(), policy, recorder)
        index, held = self._backends.index, self.core.arena_cache.held_back
        self.lookups = NodeLookups(index, held, self.core.found, self._board, ttl_s=LOOKUP_TTL_S)
        prefetches = Prefetches(self.core, index, self._backends.bulk)
        calls = NodeCalls(index, self._backends.bulk, prefetches, policy, ttl_s=config.ttl_s)
        self.server = AgentServer(
            self._socket.listener,
            self.core,
            self.saves,
            self.arena,
            self.lookups,
            calls,
            seals=config.seal_kinds,
        )
        self._recorder = recorder
        self._warnings = RecentWarnings()
        logging.getLogger("objkv").addHandler(self._warnings)
        self._http: AgentHttp | None = None
        try:
            self._http = self._open_http(prefetches)
        except ConfigError as exc:
            self._socket.report(exc)
            self.close()
            raise
        logger.info("agent ready socket=%s arena_bytes=%d", path, self.arena.nbytes)

    def _open_http(self, prefetches: Prefetches) -> AgentHttp:
        config = self._config
        status = NodeStatus(
            self.core,
            self.saves,
            self.server,
            self._recorder,
            role=config.role,
            stores=list(self._store_checks()),
            warnings=self._warnings,
        )
        return AgentHttp(
            http_path(self._path),
            prefetches,
            status,
            address=parse_address(config.agent_listen) if config.agent_listen else None,
            token=config.agent_token or "",
            tokenizers=config.agent_tokenizers,
        )

    def _store_checks(self) -> Iterator[StoreCheck]:
        urls, backends = self._config.public(), self._backends
        bulk, hot = backends.bulk, backends.hot
        yield StoreCheck("bulk", urls["bulk_url"], in_time(bulk.check))
        yield StoreCheck("index", urls["index_url"], in_time(self._check_index))
        if hot is not None:
            yield StoreCheck("hot", urls["index_url"], in_time(hot.check))

    def _check_index(self) -> None:
        """Make a round trip and, unless the role is reader, write: a full server only reads."""
        index = self._backends.index
        index.check()
        if self._config.role != "reader":
            owner = _lease_owner(self._path)
            index.lease("status", owner, ttl_ms=LEASE_MS)
            index.release("status", owner)

    def _open(self, path: Path, recorder: Recorder, replace: bool) -> None:
        """Open what may be missing or refused, and only then listen."""
        self._socket = AgentSocket(path, replace=replace)
        try:
            with ExitStack() as opened:
                self._backends = open_backends(self._config, recorder, of_agent=True)
                opened.callback(self._backends.close)
                check_backends(self._backends, self._config)
                self.arena = Arena.create(max(PAGE, self._arena_bytes()))
                opened.callback(self.arena.close)
                self._board = AnswerBoard.create()
                opened.callback(self._board.close)
                self._cache = self._open_cache(recorder)
                opened.callback(self._cache.close)
                self.core = self._open_core(recorder)
                opened.callback(self.core.close, JOIN_S)
                holder = self._socket.replaced
                if self._config.agent_listen and (holder or not replace):
                    check_address(parse_address(self._config.agent_listen), holder)
                self._socket.listen()
                opened.pop_all()
        except BaseException as exc:
            self._socket.report(exc)
            self._socket.close()
            raise
        self._socket.report(None)

    def _arena_bytes(self) -> int:
        nbytes = arena_bytes(self._config)
        if nbytes > host_bytes():
            logger.warning(
                "arena larger than this machine's memory, lower agent_memory_bytes: an agent "
                "that fills it is killed arena_bytes=%d memory_bytes=%d",
                nbytes,
                host_bytes(),
            )
        return nbytes

    def _open_cache(self, recorder: Recorder) -> ChunkCache:
        config, backends = self._config, self._backends
        settings = CacheSettings(
            _lease_owner(self._path), config.ttl_s, LEASE_MS, config.hot_save_bytes_max
        )
        return ChunkCache(
            backends.bulk,
            backends.hot,
            backends.index,
            settings,
            recorder,
            room=open_room(config, backends, recorder),
            seal=open_seal(config),
        )

    def _open_core(self, recorder: Recorder) -> Core:
        config = self._config
        # What was not read is written only if the bucket may not have it: of everything else the
        # disk needs only what recurs, a fourth or fifth of the bytes.
        limits = CoreLimits(config.load_threads, disk_keeps_all=self._rule.may_hold_back)
        disk = None
        if config.agent_disk_url is not None:
            folder = DiskFolder(local_path(config.agent_disk_url))
            disk = Disk(folder, config.agent_disk_bytes, "-".join(config.seal_kinds) or "plain")
        return Core(
            self._cache,
            self.arena,
            limits,
            recorder,
            disk=disk,
            changed=self._board.discard,
            came_due=lambda: self.saves.wake(),
        )

    def _save_limits(self) -> NodeSaveLimits:
        """Return the limits. To a folder, ``auto`` compresses nothing."""
        config, far = self._config, is_far(self._config)
        return NodeSaveLimits(
            (_FAR_SAVERS_EACH if far else _SAVERS_EACH) * config.load_threads,
            _SAVE_QUEUE_MAX,
            config.save_deadline_ms / 1000,
            config.codec if far or config.codec != "auto" else "none",
            may_save=config.role != "reader",
        )

    def run(self, ended: Callable[[float], bool], *, idle_s: float | None = None) -> None:
        """Serve until ``ended(seconds)``, which waits, is true, or ``idle_s`` without clients."""
        sys.setswitchinterval(_SWITCH_S)
        used = monotonic()
        self._board.vouch(time() + VOUCH_S)
        while not ended(_LOOK_S if idle_s is None else min(_LOOK_S, idle_s / 2)):
            self._board.vouch(time() + VOUCH_S)
            self.saves.joins.expire()
            self.saves.wake()  # totals of the last save wait to be sent
            if self.server.clients:
                used = monotonic()
            elif idle_s is not None and monotonic() - used >= idle_s:
                logger.info("agent idle, ending idle_s=%g", idle_s)
                return
            if not self._is_served():
                return

    def _is_served(self) -> bool:
        """Whether replicas can connect, or could be once the socket's folder is back."""
        if not self.server.is_accepting:
            logger.error("no thread accepts replicas any more, ending")
            return False
        try:
            listener = self._socket.restore()
            if listener is not None:
                self.server.listen_at(listener)
            if self._http is not None:
                self._http.restore()
            self._failure_log.worked()
        except AgentRuns as exc:
            logger.warning("the agent's socket is another agent's, ending reason=%s", exc)
            return False
        except Exception as exc:  # such as no memory: it is tried again
            self._failure_log.failed(exc)
        return True

    def close(self) -> None:
        """End within the drain deadline: first the socket, for the next agent, then clients as
        their leases end, then those that are left, fetches and saves."""
        end = monotonic() + self._config.drain_deadline_ms / 1000
        if self._http is not None:
            self._http.close()
        self.server.stop_accepting()
        if self.core.spill is not None:  # the next agent needs the folder
            self.core.spill.drain(JOIN_S)
            self.core.spill.close(JOIN_S)
        self._socket.close()
        self.core.drain()
        if not self.server.drain(end - monotonic()):
            logger.warning("clients dropped at shutdown count=%d", self.server.clients)
        self.core.close(min(self._config.load_deadline_ms / 1000, max(0.0, end - monotonic())))
        self.server.close()
        self._board.close()
        self.saves.close(max(0.0, end - monotonic()))
        self._cache.close()
        self._backends.close()
        self.arena.close()
        self._log_end()
        logging.getLogger("objkv").removeHandler(self._warnings)

    def _log_end(self) -> None:
        numbers, held = self._recorder.read(), self.core.arena_cache.held_back
        lost = len(held), held.nbytes
        if lost[0]:
            keeps = "agent_disk_url" if self.core.spill is None else "more agent_disk_bytes"
            logger.warning(
                "payloads lost that nothing has read again count=%d bytes=%d: set %s to keep them, "
                "or save_to_bucket to all",
                *lost,
                keeps,
            )
        logger.info(
            "agent ended hits=%d fills=%d disk_hits=%d load_bytes=%d saves=%d save_bytes=%d "
            "evictions=%d unsaved=%d unsaved_bytes=%d",
            *(numbers.get(name, 0) for name in _TOTALS),
            *lost,
        )

    def __exit__(self, *error: object) -> None:
        self.close()
