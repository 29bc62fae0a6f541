"""Clients of a node agent that ``tests.crash.agents`` kills, and what they save.

They are processes of their own, and import no torch.
"""

import argparse
import mmap
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random

from objkv.agent.client import AgentConnection
from objkv.agent.memory.arena import PAGE
from objkv.agent.messages import Commit, CommitStatus, Drop, SavedPart, Urgency, unpack_open_request
from objkv.agent.outbox import Outbox
from objkv.codec.join import PartPosition
from objkv.codec.payload import (
    Claim,
    Header,
    LayerSpec,
    Provenance,
    encode,
    frame_pages,
    read_header,
)
from objkv.errors import ObjkvError, PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash
from tests.support.samples import CHUNK, NAMESPACE

LAYERS, STAGES, COLUMNS = 4, 2, 2
RANKS = STAGES * COLUMNS
STEP_S = 5e-3
PARTS_MAX = 40
"""Payloads of which each rank hands over its part, if nobody kills it."""
_DROPPED = 0.05


class Violation(Exception):
    """Something that must not be."""


def hold(path: str, message: str) -> None:
    opening = unpack_open_request(bytes.fromhex(message))
    agent = AgentConnection(Path(path), wants_arena=True)
    print("connected", flush=True)
    while True:
        opened = agent.open(opening.wanted, deadline_s=60.0, urgency=Urgency.BETWEEN_STEPS)
        agent.release([lease.number for lease in opened[1:] if lease.number])


def commit(path: str, batch: int) -> None:
    memory, agent = _connected(path)
    for claim in claims_of(batch):
        payload = _payload(claim, range(LAYERS), "")
        status = _handed_over(memory, agent, payload)
        if status is CommitStatus.ACCEPTED:
            print(claim.key.path(), flush=True)


def hand_over(path: str, batch: int, rank: int) -> None:
    """Hand over a rank's parts of payloads, one a step, and stay connected."""
    memory, agent = _connected(path, f"replica {batch}")
    begun_s = float(sys.stdin.readline())
    stage, column = divmod(rank, COLUMNS)
    layers = range(stage * LAYERS // STAGES, (stage + 1) * LAYERS // STAGES)
    frame, dice = _spec("").nbytes, Random(rank)
    place = PartPosition(
        RANKS,
        LAYERS * COLUMNS,
        layers.start * COLUMNS + column,
        COLUMNS,
        layers.start * COLUMNS * frame,
        LAYERS * COLUMNS * frame,
    )
    for number, claim in enumerate(islice(claims_of(batch), PARTS_MAX)):
        time.sleep(max(0.0, begun_s + number * STEP_S - time.monotonic()))
        if dice.random() < _DROPPED:
            agent.drop(Drop(number, RANKS, claim.key.path()))
            continue
        payload = _payload(claim, layers, f"@H{column}-{column + 1}")
        status = _handed_over(memory, agent, payload, SavedPart(number, place))
        if status is CommitStatus.ACCEPTED:
            print(claim.key.path(), flush=True)
    print("done", flush=True)
    sys.stdin.read()


def _connected(path: str, replica: str = "") -> tuple[mmap.mmap, AgentConnection]:
    outbox = Outbox(2 * PAGE)
    memory = mmap.mmap(outbox.fd, outbox.nbytes)
    agent = AgentConnection(Path(path), outbox=outbox.fd, replica=replica)
    print("connected", flush=True)
    return memory, agent


def _handed_over(
    memory: mmap.mmap, agent: AgentConnection, payload: bytes, part: SavedPart | None = None
) -> CommitStatus:
    memory[: len(payload)] = payload
    (status,) = agent.commit([Commit(0, len(payload), part=part)])
    memory[: len(payload)] = bytes(len(payload))
    return status


def claims_of(batch: int) -> Iterator[Claim]:
    """Of the payloads of a batch, without an end."""
    for number in count():
        (prefix_hash,) = prefix_hashes(NAMESPACE, [batch, number, *range(CHUNK - 2)], CHUNK)
        key = ChunkKey(NAMESPACE, prefix_hash, 0)
        yield Claim(key, root_hash(NAMESPACE), batch, batch + 1 + number)


def _payload(claim: Claim, layers: Sequence[int], share: str) -> bytes:
    specs = [_spec(f"l.{layer}{share}") for layer in layers]
    pages = [_pages(claim, spec) for spec in specs]
    provenance = Provenance("0" * 64, "client", 1)
    return bytes(encode(claim, specs, pages, codec="none", provenance=provenance))


def _spec(name: str) -> LayerSpec:
    return LayerSpec(name or "l", "U8", (2, 1, 8, 32))


def _pages(claim: Claim, spec: LayerSpec) -> bytes:
    """Differ for each payload and each frame."""
    return Random(f"{claim.token_start} {claim.token_end} {spec.name}").randbytes(spec.nbytes)


def check_right(payload: bytes) -> Header:
    """The header of a whole payload of a batch. Raises ``Violation``."""
    header = verified(payload)
    for number, spec in enumerate(header.frames.layers):
        if frame_pages(header, number, payload, None) != _pages(header.claim, spec):
            raise Violation(f"wrong bytes are stored of {spec.name} in {header.claim}")
    names = [spec.name for spec in header.frames.layers]
    joined = [f"l.{n}@H{c}-{c + 1}" for n in range(LAYERS) for c in range(COLUMNS)]
    if names not in ([f"l.{n}" for n in range(LAYERS)], joined):
        raise Violation(f"frames {names} are stored of {header.claim}")
    return header


def verified(payload: bytes) -> Header:
    try:
        header = read_header(payload)
        if header.nbytes != len(payload):
            raise Violation(f"{len(payload)} bytes are stored of {header.nbytes}")
        for frame in range(len(header.frames)):
            frame_pages(header, frame, payload, None)
    except PayloadError as exc:
        raise Violation(f"a payload is stored in part: {exc}") from exc
    return header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hold", nargs=2)
    parser.add_argument("--commit", nargs=2)
    parser.add_argument("--parts", nargs=3)
    given = parser.parse_args()
    if given.hold:
        hold(*given.hold)
        return
    path, *numbers = given.commit or given.parts
    try:
        (commit if given.commit else hand_over)(path, *map(int, numbers))
    except ObjkvError:  # the agent was killed
        return


if __name__ == "__main__":
    main()
