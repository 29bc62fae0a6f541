"""Where the toy engine's payloads and records are, and what can be done to these places."""

import itertools
import math
import resource
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import redis

from objkv.assembly.backends import open_bulk
from objkv.cache.switch import SWITCH_PATH
from objkv.config import load_config
from objkv.stores.base import PruneStore
from objkv.telemetry import NullRecorder
from tests.support.servers.ports import free_port
from tests.support.servers.process import start_server
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import RedisServer, valkey_binary, valkey_server
from tests.support.servers.spoil import Spoil, SpoilRedis, SpoilS3
from tests.support.waiting import wait_until

HOUR_S = 3600.0
DISK_BYTES = 4 << 20
S3_KEYS = {"s3_access_key_id": "key", "s3_secret_access_key": "secret"}
SPARE_BYTES = 16 << 20
"""Of a Redis that evicts, for what is written from then on: what comes at once has to fit."""
SKEW_MAX_S = 900.0
"""More, and S3 refuses what was signed."""
BODIES = frozenset({"GET", "PUT"})
"""Verbs of S3 with a payload."""
Undo = Callable[[], object]
Fault = Generator[None]
"""Causes a fault, and undoes it when it goes on."""
P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """The wall clock of this process, as far as objkv and its clients read it; and the clock by
    which servers are left alone for a while, and saves not repeated."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.pauses_ahead_s = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.wall(), UTC)

    def pauses(self) -> float:
        return time.monotonic() + self.pauses_ahead_s


class Calls:
    """Counts calls: SQLite has no proxy that could."""

    def __init__(self) -> None:
        self.made = 0
        self._lock = Lock()

    def counting(self, call: Callable[P, T]) -> Callable[P, T]:
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._lock:
                self.made += 1
            return call(*args, **kwargs)

        return counted


class AgentSockets:
    """The sockets by which this process waits for node agents."""

    def __init__(self) -> None:
        self._usual: WeakKeyDictionary[socket.socket, float] = WeakKeyDictionary()
        """The bound of each, in seconds."""
        self._hurry_s = math.inf

    def opening(self, open_one: Callable[[float], socket.socket]) -> Callable[[float], Any]:
        """``open_one``, of whose sockets none waits long while there is a hurry."""

        def opened(call_s: float) -> socket.socket:
            sock = open_one(min(call_s, self._hurry_s))
            self._usual[sock] = call_s
            return sock

        return opened

    def hurry(self, seconds: float = math.inf) -> None:
        """Let none wait longer than this, those that are open already too. Without it, all wait as
        long as usual again."""
        self._hurry_s = seconds
        for sock, usual_s in list(self._usual.items()):
            bound = struct.pack("ll", *divmod(int(1e6 * min(usual_s, seconds)), 1_000_000))
            with suppress(OSError):  # it is closed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)


class S3Process:
    """A quick S3 server in a process of its own, which forgets all when it is killed."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        self._process, _ = start_server("quick_s3", "--port", str(self._port))

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self) -> None:
        self.kill()
        self.start()


@dataclass
class Servers:
    s3: S3Process
    """It can be killed."""
    spoil_s3: SpoilS3
    plain_s3: QuickS3
    """Has the same values, spoils none and counts nothing."""
    redis: RedisServer
    redis_proxy: SpoilRedis
    folder: Path
    clock: Clock = field(default_factory=Clock)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    files: Calls = field(default_factory=Calls)
    """What this process asked SQLite."""
    agent_sockets: AgentSockets = field(default_factory=AgentSockets)

    def __post_init__(self) -> None:
        # Read by the clock, so by no verb that is tested.
        self.spoil_s3.overlooked = SWITCH_PATH.encode()


@contextmanager
def running_servers(folder: Path) -> Iterator[Servers]:
    s3 = S3Process()
    try:
        with (
            valkey_server(folder / "valkey") as server,
            SpoilS3() as spoil_s3,
            QuickS3(values=spoil_s3.values) as plain_s3,
            SpoilRedis(("127.0.0.1", server.port)) as redis_proxy,
        ):
            yield Servers(s3, spoil_s3, plain_s3, server, redis_proxy, folder)
    finally:
        s3.kill()


class Place:
    def __init__(self, servers: Servers, world: str, *, direct: bool = False) -> None:
        """``direct``: clients go to servers that can be killed, and not to what spoils."""
        self.servers = servers
        self.folder = servers.folder / f"place-{next(servers.numbers)}"
        self.folder.mkdir()
        self.world = world
        self.extra: list[RedisServer] = []
        self.is_mounted = False
        self._undo: Undo = lambda: None
        s3 = servers.s3 if direct else servers.spoil_s3
        self._plain_s3 = (servers.s3 if direct else servers.plain_s3).url
        self.settings: dict[str, Any] = {"s3_endpoint_url": s3.url} | S3_KEYS
        if world == "s3":
            self.settings |= {
                "bulk_url": f"s3://bucket/{self.folder.name}",
                "index_url": f"{servers.redis.url}/0",
                "hot_save_bytes_max": 0,
            }
        elif world == "redis":
            address = f"{servers.redis.url}/0" if direct else servers.redis_proxy.url
            self.settings |= {"bulk_url": f"file://{self.folder}/chunks", "index_url": address}
        else:
            self.settings |= {
                "bulk_url": f"file://{self.folder}/chunks",
                "index_url": f"sqlite://{self.index_file}",
            }
        self.mend()

    @property
    def index_file(self) -> Path:
        return self.folder / "index.sqlite"

    def mend(self) -> None:
        """Undo what was injected: after a failing test, servers are there for the next one."""
        self._undo()
        self.servers.clock.ahead_s = 0.0
        self.servers.spoil_s3.mend()
        self.servers.redis_proxy.mend()

    def close(self) -> None:
        self.mend()
        for server in self.extra:
            server.kill()
        if self.extra:
            self.servers.redis.restart()
            self.servers.redis_proxy.target = ("127.0.0.1", self.servers.redis.port)
        if self.is_mounted:
            subprocess.run([_program("umount"), "--lazy", str(self.folder)], check=True)

    def asked(self) -> int:
        """Requests to the server that fails in this world, so far; of a folder, to SQLite."""
        if self.world == "folder":
            return self.servers.files.made
        proxy = self.servers.spoil_s3 if self.world == "s3" else self.servers.redis_proxy
        return sum(count for verb, count in proxy.asked.items() if verb != "CLIENT")

    def spoiled(self) -> int:
        proxy = self.servers.spoil_s3 if self.world == "s3" else self.servers.redis_proxy
        return sum(proxy.spoiled.values())

    def watch(self, namespaces: Collection[str]) -> None:
        """Count as spoiled, from now on, what S3 is asked about payloads of these namespaces."""
        self.servers.spoil_s3.spoil(*(Spoil("hook", containing=n.encode()) for n in namespaces))

    @contextmanager
    def bulk(self) -> Iterator[PruneStore]:
        settings = self.settings | {"s3_endpoint_url": self._plain_s3}
        with closing(open_bulk(load_config(settings), NullRecorder())) as store:
            yield store

    def settle(self) -> None:
        """Wait until nothing is under way that the engine does not know of."""

    def numbers(self) -> dict[str, float]:
        """What was counted outside of the engine so far."""
        return {}

    def payloads(self) -> list[str]:
        with self.bulk() as store:
            return [e.key for e in store.scan("") if e.key.endswith(".safetensors")]

    def inject(self, name: str) -> Undo:
        """Cause the fault of the row ``name``; what undoes it, once."""
        fault = self._fault(name)
        self._undo = lambda: next(fault, None)
        next(fault)
        return self._undo

    def _fault(self, name: str) -> Fault:
        own = getattr(self, f"_{name.replace('-', '_')}", None)
        if own is not None:
            return own()  # type: ignore[no-any-return]
        if name in _CLOCKS_S:
            return self._shifted(_CLOCKS_S[name])
        servers = self.servers
        proxy = servers.spoil_s3 if name.startswith("s3-") else servers.redis_proxy
        return self._spoiled_by(proxy, *_RULES[name])

    def _spoiled_by(self, proxy: SpoilS3 | SpoilRedis, *rules: Spoil) -> Fault:
        proxy.spoil(*rules)
        yield
        proxy.mend()

    def _s3_killed(self) -> Fault:
        self.servers.s3.kill()
        yield
        self.servers.s3.restart()

    def _s3_deleted(self) -> Fault:
        with self.bulk() as store:
            for path in self.payloads():
                store.delete(path)
        yield

    def _shifted(self, seconds: float) -> Fault:
        self.servers.clock.ahead_s = seconds
        skewed = Spoil("error", when=_is_skewed, error="403 RequestTimeTooSkewed")
        self.servers.spoil_s3.spoil(skewed)
        yield
        self.servers.clock.ahead_s = 0.0
        self.servers.spoil_s3.mend()

    def _redis_killed(self) -> Fault:
        self.servers.redis.kill()
        yield
        self.servers.redis.restart()

    def _redis_stalled(self) -> Fault:
        self.servers.redis.pause()
        yield
        self.servers.redis.resume()

    def prepare(self, name: str) -> None:
        """What has to be there before the healthy part of a verb's test: for a fail-over a replica
        that follows, then is cut off. What is written from now on it will lack."""
        if name != "redis-failover":
            return
        port, primary = free_port(), self.servers.redis_proxy.target[1]
        args = ("--port", str(port), "--replicaof", f"127.0.0.1 {primary}")
        with closing(_client(primary)) as at_primary:
            at_primary.config_set("repl-diskless-sync-delay", 0)
        replica = RedisServer(valkey_binary(), self.folder / str(port), port=port, args=args)
        self.extra.append(replica.start())
        with closing(replica.client()) as client, closing(_client(primary)) as at_primary:
            at_primary.set("before", "it was cut off")
            wait_until(lambda: bool(client.exists("before")), "the replica to follow")
            client.replicaof("127.0.0.1", "1")
            at_primary.delete("before")

    def _redis_failover(self) -> Fault:
        """The primary dies, the replica takes its place, and clients are led to it, as by a name or
        a virtual address."""
        replica = self.extra[-1]
        (self.extra[-2] if len(self.extra) > 1 else self.servers.redis).kill()
        with closing(replica.client()) as client:
            client.replicaof("NO", "ONE")
            assert client.exists("before")
        self.servers.redis_proxy.target = ("127.0.0.1", replica.port)
        yield

    def _redis_evicting(self) -> Fault:
        with closing(self.servers.redis.client()) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("maxmemory", 1)
            wait_until(lambda: not client.dbsize(), "the eviction")
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", used + SPARE_BYTES)
            yield
            client.config_set("maxmemory", 0)

    def _redis_full(self) -> Fault:
        with closing(self.servers.redis.client()) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            yield
            client.config_set("maxmemory", 0)

    def _redis_readonly(self) -> Fault:
        with closing(self.servers.redis.client()) as client:
            client.config_set("replica-read-only", "yes")
            client.replicaof("127.0.0.1", "1")
            yield
            client.replicaof("NO", "ONE")

    def _redis_wiped(self) -> Fault:
        with closing(self.servers.redis.client()) as client:
            client.flushall()
        yield

    def _sqlite_removed(self) -> Fault:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.index_file}{suffix}").unlink(missing_ok=True)
        yield

    def _sqlite_corrupt(self) -> Fault:
        """Each in one go: saves may be under way, and what finds no file makes one. What is put
        back is a copy, which nobody has open."""
        kept, other = (self.index_file.with_suffix(f".{name}") for name in ("kept", "other"))
        with (
            closing(sqlite3.connect(self.index_file)) as source,
            closing(sqlite3.connect(kept)) as copy,
        ):
            source.backup(copy)
        other.write_bytes(b"not a database " * 1000)
        other.replace(self.index_file)
        for suffix in ("-wal", "-shm"):
            Path(f"{self.index_file}{suffix}").unlink(missing_ok=True)
        yield
        kept.replace(self.index_file)

    def _sqlite_locked(self) -> Fault:
        with closing(
            sqlite3.connect(self.index_file, isolation_level=None, check_same_thread=False)
        ) as holder:
            holder.execute("BEGIN EXCLUSIVE")
            yield
            holder.rollback()

    def small_disk(self) -> None:
        """Make the place a file system of its own, so small that it can be filled."""
        options = ("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "objkv-test", str(self.folder))
        done = subprocess.run([_program("mount"), *options], capture_output=True)
        self.is_mounted = done.returncode == 0

    def _disk_full(self) -> Fault:
        """A disk that is full. Who may mount none gets files that cannot grow: the error is another
        then (EFBIG), and as much of one that only an operator can act on."""
        if not self.is_mounted:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
            yield
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            return
        filler = self.folder / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            for _ in range(2 * DISK_BYTES // 1024):
                file.write(bytes(1024))
        assert filler.stat().st_size < DISK_BYTES
        yield
        filler.unlink()


def _program(name: str) -> str:
    return shutil.which(name) or name


def _client(port: int) -> redis.Redis:
    return redis.Redis(port=port, protocol=2)


def _is_skewed(head: bytes) -> bool:
    """Whether the request was signed at another time than now: what S3 looks at first."""
    at = head.lower().find(b"x-amz-date:")
    stamp = head[at:].partition(b":")[2].split(b"\r\n")[0].strip().decode()
    signed = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return abs(signed.timestamp() - time.time()) > SKEW_MAX_S


_CLOCKS_S = {
    "s3-clock-ahead": 5 * HOUR_S,
    "s3-clock-behind": -5 * HOUR_S,
    "sqlite-clock-ahead": 48 * HOUR_S,
    "sqlite-clock-behind": -48 * HOUR_S,
}
"""How far this machine's clock is ahead."""
_RULES: dict[str, tuple[Spoil, ...]] = {
    "s3-reset": (Spoil("reset"),),
    "s3-unanswered": (Spoil("unanswered", BODIES),),
    "s3-stalled": (Spoil("stall"),),
    "s3-lag": (Spoil("lag"),),
    "s3-truncated": (Spoil("truncate", BODIES),),
    "s3-flipped": (Spoil("flip", BODIES),),
    "s3-500": (Spoil("error", error="500 InternalError"),),
    "s3-503": (Spoil("error", error="503 SlowDown"),),
    "s3-403": (Spoil("error", error="403 AccessDenied"),),
    "s3-404": (Spoil("error", error="404 NoSuchKey"),),
    "s3-another": (Spoil("another", frozenset({"GET"})),),
    "s3-expired": (Spoil("error", error="403 ExpiredToken"),),
    "redis-reset": (Spoil("reset"),),
    "redis-lag": (Spoil("lag", lag_s=0.02),),
    "redis-truncated": (Spoil("truncate"),),
    "redis-flipped": (Spoil("flip"),),
    "redis-loading": (Spoil("error", error="LOADING Redis is loading the dataset in memory"),),
    "redis-another": (Spoil("another"),),
}
