"""Count the Python calls of a load and of a lookup: the code that someone reads to follow one.

    python -m benchmarks.calls [--callers N]

One process has a node agent over a folder and SQLite, a worker and a scheduler's lookups, with its
socket between them. ``load`` is one of 8 chunks in the agent's memory, of 2 layers, from its
submission until its leases have ended. ``lookup`` is the first one of a process, for 8 chunks: it
connects to the agent, which asks its index. Calls of objkv on all threads are counted, also
comprehensions, and each time that a generator goes on.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import objkv
from benchmarks.worker import BOUND_S, Side, step_of, stored
from objkv.assembly.agent import NodeAgent
from objkv.assembly.link import AgentLink, Replica
from objkv.cache.lookup import LookupLimits, LookupService
from objkv.config import load_config
from objkv.connector.model.groups import Geometry
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash
from objkv.telemetry import MemoryRecorder, NullRecorder
from objkv.transfer.plan import ChunkMove, SaveMove
from tests.support.paged_cache import paged_group

CHUNK, BLOCK, CHUNKS = 256, 16, 8
EACH = CHUNK // BLOCK
GROUP = GroupIdentity("full", None, ("l0", "l1"), heads=2, content=64, block_size=BLOCK)
GEOMETRY = Geometry((GROUP,), CHUNK, BLOCK, tp_size=1)
NAMESPACE = "0123456789abcdef" * 2
HASHES = prefix_hashes(NAMESPACE, range(CHUNKS * CHUNK), CHUNK)
ROOT = str(Path(objkv.__file__).parent)
HTTP = f"{ROOT}/agent/http"
"""It looks at its sockets every half second, whatever is measured."""
QUIET_S = 0.1


class Calls:
    """Counts the calls of this thread, and of those that begin after it was made."""

    def __init__(self) -> None:
        self._on = False
        self._found: Counter[CodeType] = Counter()
        threading.setprofile(self._note)

    def of(self, work: Callable[[], object]) -> Counter[CodeType]:
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
            self._found[frame.f_code] += 1


def measure(folder: Path) -> dict[str, Counter[CodeType]]:
    """Return the calls of a load and a lookup."""
    calls, path = Calls(), folder / "agent"
    stores = {"bulk_url": f"file://{folder}/c", "index_url": f"sqlite://{folder}/i"}
    config = load_config({**stores, "agent_memory_bytes": "256MiB"}, environ={})
    with ExitStack() as stack:
        stack.enter_context(NodeAgent(config, path, MemoryRecorder()))
        _, caches = paged_group(GROUP, chunk_tokens=CHUNK, num_blocks=1 + CHUNKS * EACH, seed=1)
        side = Side(stack, {"agent": f"unix://{path}"}, GEOMETRY, caches)
        saves = [save_of(chunk) for chunk in range(CHUNKS)]
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
            while (found := lookups.ask("r", NAMESPACE, HASHES)) is None:
                lookups.wait_for("r", BOUND_S)
            assert None not in found

        return {"load": calls.of(load), "lookup": calls.of(look_up)}


def save_of(chunk: int) -> SaveMove:
    """Return the save of a chunk, in blocks of its own."""
    parent = HASHES[chunk - 1] if chunk else root_hash(NAMESPACE)
    blocks = tuple(range(1 + chunk * EACH, 1 + (chunk + 1) * EACH))
    tokens = chunk * CHUNK, (chunk + 1) * CHUNK
    return SaveMove(ChunkMove(chunk, 0, HASHES[chunk], parent, *tokens, 0, blocks), "0" * 64, None)


def sums(calls: Mapping[CodeType, int]) -> dict[str, int]:
    """Return the numbers of files, of different functions, and of calls."""
    files = {code.co_filename for code in calls}
    return {"files": len(files), "functions": len(calls), "calls": sum(calls.values())}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--callers", type=int, default=0, help="the most called functions to list")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="objkv-") as folder:
        found = measure(Path(folder))
    for name, calls in found.items():
        print(f"{name:8}", *(f"{key} {number:5}" for key, number in sums(calls).items()))
        for code, number in calls.most_common(options.callers):
            print(f"  {number:5} {code.co_filename.removeprefix(ROOT)[1:]} {code.co_qualname}")


if __name__ == "__main__":
    main()
