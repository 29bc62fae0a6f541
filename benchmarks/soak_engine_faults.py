"""The faults around the engines of a soak: spoiled responses, servers that die, stored bytes that
change, and killed engines."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.soak_shared import FaultCycle
from objkv.stores.base import PruneStore
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.redis import RedisServer
from tests.support.servers.spoil import Spoil
from tests.support.servers.spoil_redis import SpoilRedis
from tests.support.servers.spoil_s3 import SpoilS3

LAG_S = 0.4
S3_ERRORS = ("503 SlowDown", "500 InternalError", "403 AccessDenied", "404 NoSuchKey")
REDIS_ERRORS = ("LOADING wait", "READONLY replica", "OOM command not allowed", "NOPERM denied")


@dataclass
class Targets:
    """What can be made to fail."""

    s3: SpoilS3
    redis: SpoilRedis
    s3_server: QuickS3
    redis_server: RedisServer
    bulk: PruneStore
    """The bucket itself, past proxies and wrappers."""
    kill_replica: Callable[[], bool]
    """End one at once and start another; False where none is to spare."""


class Faults(FaultCycle):
    """Faults of both servers, of what they answer and store, and of engines."""

    def __init__(self, targets: Targets, seed: int) -> None:
        super().__init__(targets.redis_server, targets.bulk, seed)
        self._targets = targets
        for fault in ("reset", "unanswered", "stall", "lag", "truncate", "flip"):
            self._kinds[f"S3: {fault}"] = self._spoils(targets.s3, fault)
            self._kinds[f"Redis: {fault}"] = self._spoils(targets.redis, fault)
        self._kinds["Redis: another"] = self._spoils(targets.redis, "another")
        for error in S3_ERRORS:
            self._kinds[f"S3: {error}"] = self._refuses(targets.s3, error)
        for error in REDIS_ERRORS:
            self._kinds[f"Redis: {error.split()[0]}"] = self._refuses(targets.redis, error)
        self._kinds |= {
            "S3 is killed and comes back empty": self._kill_s3,
            "payloads are swapped": self._swap_stored,
            "an engine is killed": self._kill_engine,
        }

    @property
    def s3_address(self) -> tuple[str, int]:
        """Of the S3 server that is there now."""
        return self._targets.s3_server.address

    @property
    def spoiled(self) -> int:
        """Answers that were spoiled on their way."""
        return self._targets.s3.spoiled.total() + self._targets.redis.spoiled.total()

    def _spoils(self, proxy: SpoilS3 | SpoilRedis, fault: str) -> Callable[[], None]:
        def cause() -> None:
            proxy.spoil(Spoil(fault, lag_s=LAG_S, skip=self._random.randrange(3)))
            self._mend = proxy.mend

        return cause

    def _refuses(self, proxy: SpoilS3 | SpoilRedis, error: str) -> Callable[[], None]:
        def cause() -> None:
            proxy.spoil(Spoil("error", error=error))
            self._mend = proxy.mend

        return cause

    def _kill_s3(self) -> None:
        old = self._targets.s3_server
        old.close()

        def mend() -> None:
            self._targets.s3_server = new = QuickS3()
            self._targets.s3.target = new.address

        self._targets.s3.target = ("127.0.0.1", 1)
        self._mend = mend

    def _swap_stored(self) -> None:
        paths = self._some_paths()
        values: list[Any] = [self._targets.bulk.get(path) for path in paths]
        for path, value in zip(paths, values[1:] + values[:1], strict=True):
            if value is not None:
                self._targets.bulk.put(path, value)

    def _kill_engine(self) -> None:
        if not self._targets.kill_replica():
            self.counts["an engine is killed"] -= 1

    def _paths(self) -> list[str]:
        return [e.key for e in self._targets.bulk.scan("") if e.key.endswith(".safetensors")]
