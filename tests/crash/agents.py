"""Kills node agents, and workers that read from them and save by them, at random moments.

``python -m tests.crash.agents --rounds 1000`` stops if a block is wrong, a load does not end, the
memory of a killed worker does not come back, a payload that the agent accepted from a killed worker
is not stored, or a payload is stored in part or indexed without being stored. Workers may be ranks
of a replica, each of which hands over a part of each payload. The arena has room for few more
payloads than one worker reads, so a lease that is lost shows as a load that fails. Below it is a
disk with room for even fewer.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from objkv.agent.client import AgentConnection
from objkv.agent.messages import Claims, OpenRequest, Urgency, pack_open_request
from objkv.codec.payload import Claim
from objkv.errors import ObjkvError
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.chunk import ChunkKey
from objkv.stores.local import LocalStore
from tests.agent.reader import load_by_agent
from tests.crash.clients import PARTS_MAX, RANKS, STEP_S, Violation, check_right, claims_of
from tests.crash.run import command
from tests.support import samples
from tests.support.agents import AgentProcess
from tests.support.paged_cache import BLOCKS, HASHES, NAMESPACE, Replica, same_blocks
from tests.support.plans import unpacked
from tests.support.waiting import wait_until

CHUNKS = 4
_LATEST_S = 4e-3
"""A load takes about this long."""
_SAVING_S = 30e-3
"""A payload is handed over and saved within a millisecond."""
_JOIN_S = 3.0
"""An agent waits so long for the parts of a payload."""
_ARENA_PAYLOADS = CHUNKS + 2
"""Room for one payload that ranks join, at most a quarter of the arena."""
_BATCH = 300
"""More payloads than a worker hands over before it is killed."""
Client: TypeAlias = "subprocess.Popen[str]"


def _line(child: Client) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _await_line(child: Client) -> None:
    if _line(child) != "connected":
        raise Violation(f"a client ended with {child.wait()}")


def _accepted(child: Client) -> list[str]:
    """The payloads that it said were accepted, once it has ended."""
    return [line for line in child.communicate()[0].split() if line != "done"]


class AgentRounds:
    def __init__(self, folder: Path, seed: int, stack: ExitStack) -> None:
        self.seen: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._batch = 0
        self._checked: set[str] = set()
        self._deck: list[str] = []
        store, index = self._store, self._index = (
            LocalStore(folder / "chunks"),
            SqliteIndex(folder / "index"),
        )
        stack.callback(store.close)
        stack.callback(index.close)
        self._writer = Replica(store, index, seed=1).keep()  # type: ignore[arg-type]
        self._writer.save(range(CHUNKS))
        self._reader = Replica(store, index, seed=2).keep()  # type: ignore[arg-type]
        payload = store.head(self._writer.path(0))
        assert payload is not None
        pages = -(-payload.nbytes // 4096) * 4096
        settings = {
            "bulk_url": f"file://{folder / 'chunks'}",
            "index_url": f"sqlite://{folder / 'index'}",
            "agent_memory_bytes": str(_ARENA_PAYLOADS * pages),
            "agent_disk_url": f"file://{folder / 'disk'}",
            "agent_disk_bytes": str((CHUNKS - 1) * pages),
            "save_deadline_ms": str(round(1000 * _JOIN_S)),
        }
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        self._open = partial(AgentProcess, settings, path=sockets / "s")
        self._agent = self._open()
        self._connect = partial(AgentConnection, self._agent.path, wants_arena=True)
        load_by_agent(self._reader, self._connect)
        stack.callback(self.close)

    def close(self) -> None:
        for replica in (self._reader, self._writer):
            replica.close()
        self._agent.kill()

    def run(self) -> None:
        kinds = {
            "agent": self._kill_agent,
            "worker": self._kill_worker,
            "worker that saves": self._kill_saving_worker,
            "agent that saves": self._kill_saving_agent,
            "rank": self._kill_rank,
            "replica": self._kill_replica,
            "agent that joins": self._kill_joining_agent,
        }
        if not self._deck:  # each kind once in seven rounds
            self._deck = self._random.sample(list(kinds), len(kinds))
        kind = self._deck.pop()
        self.seen[kind] += 1
        kinds[kind]()
        self._load_all()

    def _kill_agent(self) -> None:
        for cache in self._reader.caches:
            cache.zero_()
        self._reader.loader.submit(self._reader.load_plan(range(CHUNKS), 1))
        time.sleep(self._random.uniform(0, _LATEST_S))
        self._agent.kill()
        failed = self._reader.outcome().failed_blocks
        self.seen["loads that were cut short"] += bool(failed)
        loaded = [block for block in range(1, 1 + CHUNKS * BLOCKS) if block not in failed]
        if loaded and not self._is_right(loaded):
            raise Violation("a wrong block after the agent was killed")
        self._agent = self._open()

    def _saving(self) -> Client:
        """A process that hands payloads over until it is killed. It prints which were accepted."""
        self._batch += 1
        child = self._client("--commit", str(self._batch))
        _await_line(child)
        time.sleep(self._random.uniform(0, _SAVING_S))
        return child

    def _ranks(self) -> list[Client]:
        """Those of a replica, each of which hands over parts."""
        self._batch += 1
        ranks = [self._client("--parts", str(self._batch), str(rank)) for rank in range(RANKS)]
        for child in ranks:
            _await_line(child)
        for child in ranks:
            assert child.stdin is not None
            child.stdin.write(f"{time.monotonic()}\n")
            child.stdin.flush()
        time.sleep(self._random.uniform(0, PARTS_MAX * STEP_S))
        return ranks

    def _client(self, kind: str, *numbers: str) -> Client:
        command = [sys.executable, "-m", "tests.crash.clients", kind, str(self._agent.path)]
        return subprocess.Popen(
            [*command, *numbers], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _kill_rank(self) -> None:
        """The others go on. Payloads that lack its part go at their deadline."""
        before = self._agent.metrics()
        ranks = self._ranks()
        killed = ranks.pop(self._random.randrange(RANKS))
        killed.kill()
        others = [line for child in ranks for line in iter(partial(_line, child), "done")]
        self._await_stored([*others, *_accepted(killed)])
        self._await_nothing_held()
        self._see_joins(before)
        for child in ranks:
            child.communicate()

    def _kill_replica(self) -> None:
        """Payloads that lack a part go with its last rank."""
        before = self._agent.metrics()
        ranks = self._ranks()
        for child in self._random.sample(ranks, len(ranks)):
            child.kill()
        self._await_stored([path for child in ranks for path in _accepted(child)])
        self._await_nothing_held()
        self._see_joins(before)

    def _kill_joining_agent(self) -> None:
        ranks = self._ranks()
        self._agent.kill()
        for child in ranks:
            child.communicate()  # it ends with its connection
        self._check_stored()
        self._agent = self._open()

    def _await_nothing_held(self) -> None:
        """No part of a payload that will not be whole keeps memory."""
        wait_until(lambda: not self._agent.metrics()["leased_payloads"])

    def _see_joins(self, before: Mapping[str, float]) -> None:
        for name, value in self._agent.metrics().items():
            if name.startswith("joins"):
                self.seen[name.removesuffix("_total")] += int(value - before.get(name, 0.0))

    def _kill_saving_worker(self) -> None:
        child = self._saving()
        child.kill()
        self._await_stored(_accepted(child))

    def _kill_saving_agent(self) -> None:
        """What it had accepted may be lost, but is stored as a whole or not at all."""
        child = self._saving()
        self._agent.kill()
        accepted = _accepted(child)  # it ends with its connection
        lost = sum(self._store.head(path) is None for path in accepted)
        self.seen["accepted payloads lost with their agent"] += lost
        self._check_stored()
        self._agent = self._open()

    def _await_stored(self, accepted: Sequence[str]) -> None:
        self.seen["payloads accepted of killed workers"] += len(accepted)
        wait_until(lambda: all(self._store.head(path) is not None for path in accepted))
        self._check_stored()

    def _check_stored(self) -> None:
        hashes = []
        for entry in self._store.scan(f"{samples.NAMESPACE}/"):
            if entry.key not in self._checked:
                header = check_right(self._store.get(entry.key) or b"")
                if header.claim.key.path() != entry.key:
                    raise Violation(f"another payload at {entry.key}")
                hashes.append(header.claim.key.prefix_hash)
                self._checked.add(entry.key)
        self.seen["payloads stored"] += len(hashes)
        keys = [claim.key for claim in islice(claims_of(self._batch), _BATCH)]
        found = self._index.lookup(samples.NAMESPACE, [key.prefix_hash for key in keys])
        for key, record in zip(keys, found, strict=True):
            if record is not None and self._store.head(key.path()) is None:
                raise Violation(f"indexed and not stored: {key.path()}")
            self.seen["payloads indexed"] += record is not None

    def _kill_worker(self) -> None:
        """Kill a process that holds leases of all payloads, or is about to."""
        plan = self._reader.load_plan(range(CHUNKS), 1)
        wanted = [
            Claim(
                ChunkKey(NAMESPACE, HASHES[n], 0),
                load.move.parent_hash,
                load.move.token_start,
                load.move.token_end,
            )
            for n, load in enumerate(unpacked(plan.moves))
        ]
        message = pack_open_request(
            OpenRequest(Urgency.BETWEEN_STEPS, 60_000, Claims.of(wanted))
        ).hex()
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.clients", "--hold", str(self._agent.path), message],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()  # it is connected, and goes on opening and releasing
        time.sleep(self._random.uniform(0, _LATEST_S))
        child.kill()
        child.wait()
        child.stdout.close()

    def _load_all(self) -> None:
        def is_loaded() -> bool:
            return not self._reader.load(range(CHUNKS), 1).failed_blocks

        wait_until(is_loaded)
        if not self._is_right(range(1, 1 + CHUNKS * BLOCKS)):
            raise Violation("a wrong block")

    def _is_right(self, blocks: "list[int] | range") -> bool:
        return same_blocks(self._writer.caches, blocks, self._reader.caches, blocks)


def run_rounds(rounds: int, seed: int) -> Counter[str]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = AgentRounds(folder, seed, stack)
        for number in range(rounds):
            try:
                work.run()
            except (Violation, AssertionError, ObjkvError) as exc:
                raise Violation(f"agents, seed {seed}, round {number}: {exc}") from exc
        return work.seen


def run(rounds: int, seed: int) -> None:
    seen = run_rounds(rounds, seed)
    print(", ".join(f"{name}: {count}" for name, count in sorted(seen.items())))


if __name__ == "__main__":
    sys.exit(command(__doc__, run))
