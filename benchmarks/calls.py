"""Count the Python calls of a load, a lookup and a save: the code that one reads to follow them.

    python -m benchmarks.calls [--callers N]

One process has a node agent over a folder and SQLite, a worker and a scheduler's lookups, with its
socket between them. ``load`` is one of 8 chunks in the agent's memory, of 2 layers, from its
submission until its leases have ended. ``lookup`` is the first one of a process, for 8 chunks: it
connects to the agent, which asks its index. ``save`` is one of 8 chunks, from the forward thread's
call until the agent has stored them in its folder. Its two sides, which share modules, follow.
Calls of objkv on all threads are counted, also comprehensions, and each time that a generator goes
on.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import objkv
from benchmarks.worker import (
    BLOCK,
    BLOCKS,
    BOUND_S,
    CHUNK,
    Side,
    moves_of,
    saves_of,
    step_of,
    stored,
)
from objkv.assembly.agent import NodeAgent
from objkv.assembly.link import AgentLink, Replica
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.config import load_config
from objkv.connector.model.groups import Geometry
from objkv.keys.identity import GroupIdentity
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.support.paged_cache import paged_group

CHUNKS = 8
GROUP = GroupIdentity("full", None, ("l0", "l1"), heads=2, content=64, block_size=BLOCK)
GEOMETRY = Geometry((GROUP,), CHUNK, BLOCK, tp_size=1)
NAMESPACE = "0123456789abcdef" * 2
ROOT = str(Path(objkv.__file__).parent)
HTTP = f"{ROOT}/agent/http"
"""It looks at its sockets every half second, whatever is measured."""
QUIET_S = 0.1
Found = Counter[tuple[int, CodeType]]
"""How often each thread called a function."""


class Calls:
    """Counts the calls of this thread, and of those that begin after it was made."""

    def __init__(self) -> None:
        self._on = False
        self._found: Found = Counter()
        threading.setprofile(self._note)

    def of(self, work: Callable[[], object]) -> Found:
        """Return the calls of ``work``, and of what other threads do until they are quiet."""
        self._found, self._on = Counter(), True
        sys.setprofile(self._note)
        work()
        sys.setprofile(None)
        before = -1
        while self._found.total() != before:
            before = self._found.total()
            time.sleep(QUIET_S)  # the other threads end what they began
        self._on = False
        return self._found

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self._on and event == "call" and name.startswith(ROOT) and not name.startswith(HTTP):
            self._found[threading.get_ident(), frame.f_code] += 1


def measure(folder: Path) -> dict[str, Found]:
    """Return the calls of a load, a lookup and a save."""
    calls, path = Calls(), folder / "agent"
    stores = {"bulk_url": f"file://{folder}/c", "index_url": f"sqlite://{folder}/i"}
    config = load_config({**stores, "agent_memory_bytes": "256MiB"}, environ={})
    with ExitStack() as stack:
        stack.enter_context(NodeAgent(config, path, MemoryRecorder()))
        room = range(1, 1 + CHUNKS * BLOCKS)
        _, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=1 + len(room), seed=1)
        of_agent = set(threading.enumerate())
        side = Side(stack, {"agent": f"unix://{path}"}, GEOMETRY, caches)
        begun = set(threading.enumerate()) - of_agent
        of_worker = {one.ident for one in begun if not one.name.startswith("objkv-agent")}
        of_worker.add(threading.get_ident())
        moves = moves_of(NAMESPACE, range(2 * CHUNKS * CHUNK), [*room, *room])
        saves, more = saves_of(moves[:CHUNKS]), saves_of(moves[CHUNKS:])
        hashes = [move.prefix_hash for move in moves[:CHUNKS]]
        side.save(NAMESPACE, saves)
        step = step_of(NAMESPACE, stored(side.index, NAMESPACE, saves))
        side.load(step)  # later ones know the shape of the payloads
        loads = side.worker.loader
        link = AgentLink(load_config({"agent": f"unix://{path}"}, environ={}), Replica("calls"))
        index, limits = link.calls, LookupLimits(BOUND_S, 4)
        fields = sorted(GEOMETRY.all_fields())
        lookups = LookupService(index, fields, NullRecorder(), limits)
        stack.callback(link.calls.close)
        stack.callback(lookups.close)

        def load() -> None:
            loads.submit(step.loads[0])
            while not (outcomes := loads.take_finished(sync=False)):
                loads.wait_over(BOUND_S)
            assert not outcomes[0].failed_blocks

        def look_up() -> None:
            while (found := lookups.ask("r", NAMESPACE, hashes)) is None:
                lookups.wait_for("r", BOUND_S)
            assert None not in found

        found = {"load": calls.of(load), "lookup": calls.of(look_up)}
        found["save"] = calls.of(lambda: side.save(NAMESPACE, more))
        stored(side.index, NAMESPACE, more)
        for name, is_worker in (("save-worker", True), ("save-agent", False)):
            rows = found["save"].items()
            found[name] = Counter({k: n for k, n in rows if (k[0] in of_worker) is is_worker})
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, default=0, help="the most called functions to list")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="objkv-") as folder:
        found = measure(Path(folder))
    for name, counted in found.items():
        calls: Counter[CodeType] = Counter()
        for (_, code), number in counted.items():
            calls[code] += number
        files = len({code.co_filename for code in calls})
        print(f"{name:11} files {files:5} functions {len(calls):5} calls {calls.total():5}")
        for code, number in calls.most_common(options.callers):
            print(f"  {number:5} {code.co_filename.removeprefix(ROOT)[1:]} {code.co_qualname}")


if __name__ == "__main__":
    main()
