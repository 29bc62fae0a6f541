"""Two nodes over one bucket and one index: a replica and an agent each, of which one holds payloads
back that the other one's lookups miss; and what can be done to them meanwhile."""

import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import redis

from objkv.index.redis.index import RedisIndex
from objkv.index.shapes import is_shapes
from objkv.keys.chunk import payload_path
from tests.connector.kv.hybrid_engine import Answer
from tests.faults.agents import PATIENCE_S
from tests.faults.places import Place, Servers, Undo
from tests.faults.toy import CHUNKS, STORED_TOKENS, ShakenEngine, prompt
from tests.support.agents import AgentProcess
from tests.support.servers.process import freeze
from tests.support.servers.spoil import Spoil, wait_for

ARENA_BYTES: Final = 1 << 20
_SIGHTED_S: Final = 5.0
"""How long a sighting may take before another prompt is tried: an index that is back is left alone
for a moment."""
_PUTS, _REQUESTS = frozenset({"PUT"}), frozenset({"XADD"})
_OF_OTHERS: Final = b"NOMKSTREAM"
"""In requests to another agent, and not in what an agent sends itself."""


class Node:
    """An agent that holds payloads back, and its replica, which has nothing else."""

    def __init__(self, folder: Path, path: Path, settings: dict[str, Any], **replica: Any) -> None:
        self._settings = {name: str(value) for name, value in settings.items()}
        self._path = path
        self.agent = self._start()
        nowhere = {"bulk_url": "file:///nowhere/chunks", "index_url": "sqlite:///nowhere/index"}
        self.engine = ShakenEngine(folder, agent=self.agent.url, **nowhere, **replica)

    def _start(self) -> AgentProcess:
        return AgentProcess(self._settings, path=self._path)

    def revive(self) -> None:
        """Have another agent if this one is dead, and wait until the replica has found it."""
        if self.agent.process.poll() is not None:
            shutil.rmtree(self.agent.folder)
            self.agent = self._start()
        assert wait_for(self.engine.is_attached, bound_s=PATIENCE_S)

    def answer(self, tokens: list[int]) -> Answer:
        """The answer to a prompt, once the agent has what was computed for it."""
        answer = self.engine.answer(tokens)
        self.engine.save_all()
        self.engine.forget()
        return answer

    def counted(self) -> dict[str, float]:
        """What replica and agent have counted, the latter as ``agent_<name>``."""
        try:
            agent = self.agent.metrics()
        except (OSError, HTTPException):
            agent = {}
        theirs = {f"agent_{name.removesuffix('_total')}": value for name, value in agent.items()}
        return theirs | self._own()

    def _own(self) -> dict[str, float]:
        recorder = self.engine.scheduler.connector.recorder
        return {name: recorder.value(name) for name in ("put_waits", "put_waits_given_up")}

    def close(self) -> None:
        """End both."""
        self.engine.__exit__()
        self.agent.__exit__(None, None, None)


class TwoNodes:
    """The holder goes to S3 through the proxy, and the asker to Redis."""

    def __init__(self, servers: Servers, **replica: Any) -> None:
        self.servers = servers
        with closing(servers.redis.client()) as client:
            client.flushall()
        self._place = Place(servers, "s3")
        self._sockets = Path(tempfile.mkdtemp(prefix="objkv-", dir="/tmp"))
        common = self._place.settings | {
            "agent_memory_bytes": ARENA_BYTES,
            "agent_fetch_processes": 0,
            "codec": "none",
            "save_to_bucket": "reused",
            "save_threads": 1,
            "lookup_ttl_ms": 0,
            "breaker_failures": 1,
            "breaker_reset_ms": 10,
            "breaker_reset_max_ms": 20,
            "lookup_deadline_ms": 20_000,
            "load_deadline_ms": 20_000,
            "save_deadline_ms": 600_000,
            "drain_deadline_ms": 10_000,
        }
        asking = {"s3_endpoint_url": servers.s3.url, "index_url": servers.redis_proxy.url}
        self.holder, self.asker = (
            Node(self._place.folder, self._sockets / name, common | own, **replica)
            for name, own in (("holder", {}), ("asker", asking))
        )
        self._index = RedisIndex(redis.Redis.from_url(f"{servers.redis.url}/0"))

    def close(self) -> None:
        """End everything."""
        self._place.mend()
        self.holder.close()
        self.asker.close()
        self._index.close()
        self._place.close()
        shutil.rmtree(self._sockets)

    def hold_back(self) -> list[int]:
        """Have the holder's replica compute a prompt. Its tokens, once the index has the holder."""
        found: list[list[int]] = []
        # An index that has lost its data gets an agent's stream again after some seconds.
        streams = self._index.client.scan_iter
        assert wait_for(lambda: len(list(streams("objkv:q:*"))) >= 2, bound_s=PATIENCE_S)

        def is_held() -> bool:
            tokens = prompt(next(self.servers.numbers))
            before = self._sighted()
            self.holder.answer(tokens)
            wait_for(lambda: len(self._sighted()) == len(before) + CHUNKS, bound_s=_SIGHTED_S)
            new = {name: one for name, one in self._sighted().items() if name not in before}
            if len(new) == CHUNKS and all(new.values()):
                found.append(tokens)
            return bool(found)

        assert wait_for(is_held, bound_s=PATIENCE_S), self.holder.agent.log()
        return found[0]

    def _sighted(self) -> dict[bytes, bytes]:
        """The holder of each payload that was sighted, empty if it can be asked for nothing."""
        client = self._index.client
        return {name: client.get(name) or b"" for name in client.scan_iter("objkv:s:*")}

    def comes(self) -> bool:
        """Whether what the holder holds back is loaded by the asker's replica."""
        return self.asker.answer(self.hold_back()).loaded == STORED_TOKENS

    def lost(self) -> list[str]:
        """Paths of payloads that have a record, and that the bucket does not have."""
        recorded = [
            payload_path(name, record.prefix_hash, field)
            for name in self._index.namespaces()
            for record in self._index.scan(name)
            if not is_shapes(record)
            for field in record.shards
        ]
        stored = set(self._place.payloads())  # last, since records follow payloads
        return [path for path in recorded if path not in stored]

    def inject(self, name: str) -> Undo:
        """Cause the fault of the row ``name``; what undoes it."""
        undo: Undo = getattr(self, f"_{name.replace('-', '_')}")()
        return undo

    def _holder_killed(self) -> Undo:
        return self._at_request(self.holder.agent.kill)

    def _holder_killed_putting(self) -> Undo:
        return self._killed_at_put(0)

    def _holder_killed_between(self) -> Undo:
        return self._killed_at_put(1)

    def _killed_at_put(self, skip: int) -> Undo:
        kill = self.holder.agent.kill
        rule = Spoil("hook", _PUTS, containing=b".safetensors", skip=skip, times=1, hook=kill)
        self.servers.s3_proxy.spoil(rule)
        return self._mended

    def _holder_frozen(self) -> Undo:
        process = self.holder.agent.process
        freeze(process.pid)

        def undo() -> None:
            process.send_signal(signal.SIGCONT)

        return undo

    def _holder_refused(self) -> Undo:
        self.servers.s3_proxy.spoil(Spoil("error", _PUTS, error="403 AccessDenied"))
        return self._mended

    def _request_reset(self) -> Undo:
        return self._spoil_requests("reset")

    def _request_unanswered(self) -> Undo:
        return self._spoil_requests("unanswered")

    def _request_index_killed(self) -> Undo:
        self._at_request(self.servers.redis.kill)

        def undo() -> None:
            self.servers.redis.restart()
            self._mended()

        return undo

    def _at_request(self, hook: Callable[[], None]) -> Undo:
        """``hook`` is called when the asker leaves a request, before the index has it."""
        rule = Spoil("hook", _REQUESTS, containing=_OF_OTHERS, times=1, hook=hook)
        self.servers.redis_proxy.spoil(rule)
        return self._mended

    def _spoil_requests(self, fault: str) -> Undo:
        self.servers.redis_proxy.spoil(Spoil(fault, _REQUESTS, containing=_OF_OTHERS))
        return self._mended

    def _mended(self) -> None:
        self._place.mend()
        self.holder.revive()
