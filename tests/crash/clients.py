"""Clients of a node agent that ``tests.crash.agents`` kills, and what they save.

They are processes of their own, and import no torch.
"""

import argparse
import mmap
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from objkv.agent.client import AgentConnection
from objkv.agent.memory.arena import PAGE
from objkv.agent.messages import CommitStatus, Urgency, unpack_opening
from objkv.agent.outbox import Outbox
from objkv.codec.payload import Header, frame_pages, read_header
from objkv.errors import ObjkvError, PayloadError
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash
from tests.support import samples


class Violation(Exception):
    """Something that must not be."""


def hold(path: str, message: str) -> None:
    """Open and release payloads for ever."""
    opening = unpack_opening(bytes.fromhex(message))
    agent = AgentConnection(Path(path), wants_arena=True)
    print("connected", flush=True)
    while True:
        leases = agent.open(opening.wanted, deadline_s=60.0, urgency=Urgency.BETWEEN_STEPS)
        agent.release([lease.number for lease in leases[1:] if lease.number])


def commit(path: str, batch: int) -> None:
    """Hand payloads over until killed, or until the agent is."""
    outbox = Outbox(2 * PAGE)
    memory = mmap.mmap(outbox.fd, outbox.nbytes)
    agent = AgentConnection(Path(path), outbox=outbox.fd)
    print("connected", flush=True)
    for key, payload in payloads_of(batch):
        memory[: len(payload)] = payload
        try:
            status = agent.commit(0, len(payload))
        except ObjkvError:
            return
        memory[: len(payload)] = bytes(len(payload))
        if status is CommitStatus.ACCEPTED:
            print(key.path(), flush=True)


def payloads_of(batch: int) -> Iterator[tuple[ChunkKey, bytes]]:
    """The payloads of a batch, without an end."""
    for number in count():
        tokens = [batch, number, *range(samples.CHUNK - 2)]
        (prefix_hash,) = prefix_hashes(samples.NAMESPACE, tokens, samples.CHUNK)
        parent = root_hash(samples.NAMESPACE)
        chunk = ChunkEntry(samples.NAMESPACE, prefix_hash, parent, 0, samples.CHUNK)
        key = ChunkKey(samples.NAMESPACE, prefix_hash, 0)
        yield key, samples.payload_of(key, chunk, tokens, "none")


def verified(payload: bytes) -> Header:
    """The header of a whole payload. Raises ``Violation``."""
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
    given = parser.parse_args()
    if given.commit:
        commit(given.commit[0], int(given.commit[1]))
    else:
        hold(*given.hold)


if __name__ == "__main__":
    main()
