"""What a save may take and leave behind, what is saved once, and how it ends."""

import logging
import math
import random
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Condition, Event, Thread

import pytest
import torch

from objkv.cache.chunks import KEEP_S, CacheSettings, ChunkCache, InFlightSaves
from objkv.codec.payload import frame_pages, open_payload, payload_bytes_max, read_header
from objkv.errors import LeftAlone, StoreBusy, StoreError, StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.stores.base import Buffer, WriteStore
from objkv.stores.local import LocalStore
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder, NullRecorder
from objkv.transfer.lanes import BlockRuns, HostLane, HostMark, Mark, PagedLayers
from objkv.transfer.plan import ChunkMove, SaveMove, SavePlan
from objkv.transfer.saver import SaveLimits, Saver
from objkv.transfer.slabs import SlabPool
from tests.contracts.clock import ManualClock
from tests.support.device import ON_HOST
from tests.support.paged_cache import CHUNK, NAMESPACE, TOKENS, Replica, paged_group, stores
from tests.support.waiting import PATIENCE_S, wait_until

# What saving may take: memory, slabs, threads, and how it ends.


BIG_CHUNKS, BIG_CHUNK, BIG_BLOCK = 4, 256, 32
BIG = GroupIdentity("full", None, tuple(f"l{i}" for i in range(8)), 8, 256, BIG_BLOCK)
"""8 layers of 1 MiB a chunk."""
BIG_TOKENS = list(range(BIG_CHUNKS * BIG_CHUNK))
BIG_HASHES = prefix_hashes(NAMESPACE, BIG_TOKENS, BIG_CHUNK)


class NullStore(MemoryStore):
    """Takes everything and keeps nothing."""

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        return True


def big_plan(request: str = "r") -> SavePlan:
    moves = []
    for c in range(BIG_CHUNKS):
        first = 1 + c * BIG_CHUNK // BIG_BLOCK
        move = ChunkMove(
            chunk=c,
            group=0,
            prefix_hash=BIG_HASHES[c],
            parent_hash=BIG_HASHES[c - 1] if c else root_hash(NAMESPACE),
            token_start=c * BIG_CHUNK,
            token_end=(c + 1) * BIG_CHUNK,
            first_block=0,
            block_ids=tuple(range(first, first + BIG_CHUNK // BIG_BLOCK)),
        )
        digest = token_digest(BIG_TOKENS[c * BIG_CHUNK : (c + 1) * BIG_CHUNK])
        moves.append(SaveMove(move, digest, None))
    return SavePlan(request, NAMESPACE, tuple(moves))


@ON_HOST
@pytest.mark.parametrize("kind", [NullStore, LocalStore])
def test_saving_takes_no_memory_but_the_slabs(kind: type, tmp_path: Path) -> None:
    """Chunks of 8 MiB, all at once."""
    store: WriteStore = LocalStore(tmp_path) if kind is LocalStore else NullStore()
    paged, _ = paged_group(
        BIG, chunk_tokens=BIG_CHUNK, num_blocks=1 + BIG_CHUNKS * BIG_CHUNK // BIG_BLOCK, seed=1
    )
    cache = ChunkCache(store, None, MemoryIndex(), CacheSettings("w", 60, 1000, 0), NullRecorder())
    slabs = SlabPool("save", count=BIG_CHUNKS, slab_bytes=payload_bytes_max(paged.layers))
    limits, recorder = SaveLimits(1, BIG_CHUNKS, PATIENCE_S, "none", "w"), MemoryRecorder()
    saver = Saver(cache, {0: paged}, slabs, lane=HostLane(), limits=limits, recorder=recorder)
    tracemalloc.start()
    try:
        assert saver.gather((big_plan(),)) == set()
        assert saver.drain(PATIENCE_S)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        saver.close(PATIENCE_S)
    assert recorder.value("saves") == BIG_CHUNKS
    assert peak < 256 * 1024


class CountingLane(HostLane):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mark_compute(self) -> Mark:
        self.calls.append("mark_compute")
        return super().mark_compute()

    def follow(self, mark: Mark) -> None:
        self.calls.append("follow")

    def place(self, block_ids: Sequence[int]) -> BlockRuns:
        self.calls.append("place")
        return super().place(block_ids)

    def gather(self, layers: PagedLayers, placed: BlockRuns, pages: Sequence[torch.Tensor]) -> None:
        self.calls.append(f"gather {len(pages)}")
        super().gather(layers, placed, pages)

    def mark(self) -> Mark:
        self.calls.append("mark")
        return super().mark()


@ON_HOST
def test_all_chunks_of_a_step_are_gathered_with_one_call() -> None:
    replica, lane = Replica(*stores(), seed=1), CountingLane()
    replica.saver.close(PATIENCE_S)
    replica.saver = replica.saver_of(SaveLimits(1, 8, PATIENCE_S, "none", "w"), lane)
    assert replica.save(range(4)) == set()
    assert lane.calls == ["mark_compute", "follow", "place", "gather 4", "mark"]
    assert replica.recorder.value("saves") == 4


@ON_HOST
def test_a_step_without_saves_does_not_touch_the_device() -> None:
    replica, lane = Replica(*stores(), seed=1), CountingLane()
    saver = replica.saver_of(SaveLimits(1, 8, PATIENCE_S, "none", "w"), lane)
    assert saver.gather(()) == set()
    saver.fence()
    saver.fence({"r"})
    assert saver.left_device("r")
    assert lane.calls == []
    saver.close(0.0)


def test_a_drop_is_counted_in_chunks_and_in_bytes() -> None:
    replica = Replica(*stores(), seed=1, slabs=1)
    with replica.save_slabs.lease():
        assert len(replica.save(range(2))) == 2
    assert replica.recorder.value("save_drops") == 2
    assert replica.recorder.value("save_drop_bytes") == 2 * replica.paged.raw_bytes


@pytest.mark.parametrize("codec", ["none", "lz4", "blosc", "blosclz4"])
def test_saves_are_counted_by_the_codec_they_ended_up_with(codec: str) -> None:
    replica = Replica(*stores(), seed=1, codec=codec)
    for cache in replica.caches:
        cache.fill_(1.0)
    replica.save(range(2))
    assert replica.recorder.value(f"save_codec_{codec}") == 2


def test_closing_ends_the_threads_and_gives_every_slab_back() -> None:
    replica = Replica(*stores(), seed=1)
    replica.save(range(2))
    replica.saver.close(PATIENCE_S)
    assert replica.saver.threads == 0
    assert replica.save_slabs.leased == 0
    replica.loader.close()


def test_a_put_that_does_not_end_holds_up_no_shutdown_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SlowStore()
    replica = Replica(store, MemoryIndex(), seed=1, slabs=4)
    gathered = SavePlan("r", NAMESPACE, tuple(_saves(replica, 3)))
    assert replica.saver.gather((gathered,)) == set()
    wait_until(lambda: store.puts > 0)
    with caplog.at_level(logging.WARNING):
        replica.saver.close(0.0)
    assert "saves dropped at shutdown count=3" in caplog.text
    assert replica.recorder.value("save_drops") == 2
    assert replica.save_slabs.leased == 1, "the one that is on the wire"
    store.go.set()
    wait_until(lambda: replica.save_slabs.leased == 0)
    replica.loader.close()


@pytest.mark.parametrize(("takes_s", "is_told"), [(5.5, False), (math.inf, True)])
def test_a_device_that_does_not_end_its_copies_holds_up_no_shutdown_and_is_told(
    takes_s: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(0.0)

    class SlowMark(HostMark):
        def done(self) -> bool:
            clock.advance(0.25)  # so long until it is asked again
            return clock.now_s >= takes_s

        def wait(self) -> None:
            raise AssertionError("nobody may wait without a bound")

    replica = Replica(*stores(), seed=1)
    saver = replica.saver_of(SaveLimits(1, 8, PATIENCE_S, "none", "w"), clock=clock)
    saver._open.append(SlowMark())
    saver.close(5.0)
    assert ("copies of saves did not finish" in caplog.text) is is_told
    assert clock.now_s == (6.0 if is_told else 5.5)
    assert saver.threads == 0


def test_after_closing_nothing_is_saved_and_no_slab_is_leased() -> None:
    replica = Replica(*stores(), seed=1)
    replica.saver.close(PATIENCE_S)
    dropped = replica.saver.gather((SavePlan("r", NAMESPACE, tuple(_saves(replica, 2))),))
    assert dropped == {("r", 0), ("r", 1)}
    assert replica.save_slabs.leased == 0
    replica.loader.close()


def test_a_payload_that_was_sent_from_a_slab_is_not_changed_by_the_next_one() -> None:
    """Slabs are used again: what a store was given must be stored when its put returns."""
    store, index = stores()
    writer, reader = Replica(store, index, seed=1, slabs=1), Replica(store, index, seed=2)
    for chunk in range(3):
        writer.save(range(chunk, chunk + 1), first_block=1 + 2 * chunk)
    outcome = reader.load(range(3), first_block=9)
    assert not outcome.failed


def _saves(replica: Replica, count: int) -> list[SaveMove]:
    moves = [replica.move(c, 1) for c in range(count)]
    return [SaveMove(move, "0" * 64, None) for move in moves]


@pytest.mark.parametrize("refusal", [LeftAlone("open"), StoreBusy("503")])
def test_saves_give_way_for_a_moment_to_a_store_that_wants_none(
    refusal: StoreError,
) -> None:
    class Refusing(MemoryStore):
        def put_if_absent(self, key: str, value: Buffer) -> bool:
            raise refusal

    clock, replica = ManualClock(), Replica(Refusing(), MemoryIndex(), seed=1)
    saver = replica.saver_of(SaveLimits(1, 8, PATIENCE_S, "none", "w"), clock=clock)
    saver.gather((SavePlan("r", NAMESPACE, tuple(_saves(replica, 1))),))
    assert saver.drain(PATIENCE_S)
    clock.advance(0.09)
    assert saver.is_shedding
    saves = tuple(_saves(replica, 2))
    assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == set(), "a drop is planned again"
    assert replica.save_slabs.leased == 0
    clock.advance(0.02)
    assert not saver.is_shedding
    assert replica.recorder.value("saves_shed") == 3
    assert replica.recorder.value("save_errors") == 0
    saver.close(PATIENCE_S)


@pytest.mark.parametrize(("far", "codecs"), [(False, {"none"}), (True, {"blosc", "blosclz4"})])
def test_auto_compresses_for_a_slow_network_and_never_without_one(
    far: bool, codecs: set[str]
) -> None:
    """What a directory's disk takes for a put says nothing about a load."""
    replica = Replica(*stores(), seed=1)
    for cache in replica.caches:
        cache.fill_(1.0)
    replica.cache.link.puts.observe(1, 1.0)
    saver = replica.saver_of(SaveLimits(1, 8, PATIENCE_S, "auto", "w", far=far))
    saver.gather((SavePlan("r", NAMESPACE, tuple(_saves(replica, 1))),))
    assert saver.drain(PATIENCE_S)
    saver.close(PATIENCE_S)
    assert sum(replica.recorder.value(f"save_codec_{codec}") for codec in codecs) == 1
    assert not replica.load(range(1), first_block=9).failed


# Above the quota nothing is saved, nothing waits, and what is stored is still loaded.


class Switch:
    """Room as a test says."""

    def __init__(self) -> None:
        self.is_there = True
        self.added = 0
        self.is_closed = False

    def has_room(self) -> bool:
        return self.is_there

    def add(self, nbytes: int) -> None:
        self.added += nbytes

    def close(self) -> None:
        self.is_closed = True


def test_above_the_quota_nothing_is_saved_and_no_slab_is_held() -> None:
    index, room = MemoryIndex(), Switch()
    replica = Replica(MemoryStore(), index, seed=1)
    replica.cache._room = room
    assert replica.save(range(2)) == set()
    (usage,) = index.usage()
    assert (usage.namespace, usage.nbytes) == (NAMESPACE, room.added)
    room.is_there = False
    assert replica.save(range(4)) == set(), "dropped saves would be planned again at once"
    assert replica.recorder.value("save_over_quota") == 4
    assert index.usage()[0].nbytes == room.added
    assert replica.saver.left_device("r")
    outcome = replica.load(range(2), 10)
    assert not outcome.failed
    room.is_there = True
    replica.save(range(4))
    assert index.usage()[0].payloads == 4
    replica.cache.close(1)
    assert room.is_closed


# Prompts that arrive together share chunks that nobody knows to be stored: each is saved once.


class SlowStore(MemoryStore):
    """Counts puts, which wait until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = Event()
        self.puts = 0

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        self.puts += 1
        assert self.go.wait(PATIENCE_S)
        return super().put_if_absent(key, value)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
def replica(store: SlowStore) -> Replica:
    replica = Replica(store, MemoryIndex(), seed=1, slabs=1)
    # What was saved is remembered, however long a busy machine takes.
    replica.cache._saves = InFlightSaves(clock=ManualClock())
    return replica


def gather(replica: Replica, request: str) -> set[tuple[str, int]]:
    save = SaveMove(replica.move(0, 1), token_digest(TOKENS[:CHUNK]), None)
    return replica.saver.gather((SavePlan(request, NAMESPACE, (save,)),))


def test_requests_of_one_step_save_their_common_chunk_once(
    replica: Replica, store: SlowStore
) -> None:
    dropped = [gather(replica, f"r{i}") for i in range(20)]
    store.go.set()
    assert replica.saver.drain(PATIENCE_S)
    assert not any(dropped), "a repeat needs no slab of its own, and is no drop"
    assert store.puts == 1
    assert replica.recorder.value("saves") == 1
    assert replica.recorder.value("save_repeats") == 19


def test_a_chunk_that_was_just_saved_is_not_saved_again(replica: Replica, store: SlowStore) -> None:
    store.go.set()
    replica.save(range(1))
    replica.save(range(1), request="later")
    assert store.puts == 1


@pytest.mark.parametrize("what", ["lost", "corrupt"])
def test_a_chunk_that_was_found_bad_is_saved_again(
    replica: Replica, store: SlowStore, what: str
) -> None:
    store.go.set()
    replica.save(range(1))
    if what == "lost":
        store.delete(replica.path(0))
    else:
        store.put(replica.path(0), b"not a payload")
    assert replica.load(range(1), first_block=9).failed
    replica.save(range(1))
    assert replica.recorder.value("saves") == 2
    assert not replica.load(range(1), first_block=9).failed


def test_a_chunk_that_is_found_corrupt_while_it_is_being_saved_is_mended_by_the_next_request(
    replica: Replica, store: SlowStore
) -> None:
    """The save under way has looked before that was known, and takes what is there for good."""
    store.go.set()
    other = Replica(store, replica.index, seed=2)
    other.save(range(1))
    payload = bytearray(store.get(replica.path(0)) or b"")
    payload[-1] ^= 1
    store.put(replica.path(0), payload)
    store.go.clear()
    gather(replica, "while it is loaded")
    wait_until(lambda: store.puts == 2)
    assert replica.load(range(1), first_block=9).failed
    store.go.set()
    assert replica.saver.drain(PATIENCE_S)
    replica.save(range(1), request="recomputed")
    assert not replica.load(range(1), first_block=9).failed


def test_a_save_that_was_not_announced_may_be_tried_by_the_next_request(
    replica: Replica, store: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreUnavailable("gone")

    store.go.set()
    with monkeypatch.context() as broken:
        broken.setattr(replica.index, "publish", fail)
        replica.save(range(1))
    replica.save(range(1))
    assert not replica.load(range(1), first_block=9).failed


def test_a_drop_leaves_the_chunk_to_the_next_request(replica: Replica, store: SlowStore) -> None:
    with replica.save_slabs.lease():
        assert gather(replica, "without a slab") == {("without a slab", 0)}
    store.go.set()
    assert gather(replica, "with one") == set()
    assert replica.saver.drain(PATIENCE_S)
    assert store.puts == 1


def test_what_was_saved_is_remembered_for_a_while() -> None:
    clock = ManualClock()
    repeats = InFlightSaves(clock=clock)
    assert repeats.begin("a")
    repeats.keep("a")
    repeats.end("a")
    assert not repeats.begin("a")
    clock.advance(KEEP_S)
    assert repeats.begin("a")
    assert not repeats.begin("a")
    repeats.end("a")
    assert repeats.begin("a")


# Saves through a lane whose copies are made later than they are given, as on a GPU, into a store
# that fails now and then: what is stored is what the blocks held, and every chunk is accounted for.


STEPS = 30
ENDS = ("saves", "save_drops", "save_errors", "save_existed", "save_repeats")


class LateMark:
    def __init__(self, lane: "LateGathers", number: int) -> None:
        self._lane = lane
        self.number = number
        self._asked = False

    def done(self) -> bool:
        if self._asked:  # when it was given, none is done
            self._lane.allow(self.number)
        self._asked = True
        return self._is_done()

    def wait(self) -> None:
        with self._lane.changed:
            assert self._lane.changed.wait_for(self._is_done, PATIENCE_S)

    def hold_compute(self) -> None:
        self._lane.allow(self.number)
        self.wait()

    def _is_done(self) -> bool:
        return self._lane.copied >= self.number


class LateGathers(HostLane):
    """A thread makes the copies, in their order, when the forward thread asks for them: no sooner
    than it must, so that whoever does not ask lets them come too late."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.given = self.copied = 0
        self._allowed = 0
        self._left = deque[tuple[PagedLayers, BlockRuns, Sequence[torch.Tensor]] | None]()
        self._thread = Thread(target=self._copy, daemon=True)
        self._thread.start()

    def gather(self, layers: PagedLayers, placed: BlockRuns, pages: Sequence[torch.Tensor]) -> None:
        with self.changed:
            self.given += 1
            self._left.append((layers, placed, pages))
            self.changed.notify_all()

    def mark(self) -> LateMark:
        return LateMark(self, self.given)

    def allow(self, number: int) -> None:
        with self.changed:
            self._allowed = max(self._allowed, number)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self._allowed += 1
            self._left.append(None)
            self.changed.notify_all()
        self._thread.join()

    def _copy(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._left and self.copied < self._allowed)
                work = self._left.popleft()
            if work is None:
                return
            super().gather(*work)
            with self.changed:
                self.copied += 1
                self.changed.notify_all()


class UnsteadyStore(MemoryStore):
    """Fails before a put, or loses the answer after it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        luck = self._random.random()
        if luck < 0.15:
            raise StoreUnavailable("did not arrive")
        written = super().put_if_absent(key, value)
        if luck < 0.3:
            raise StoreUnavailable("the answer was lost")
        return written


@ON_HOST
@pytest.mark.parametrize("codec", ["none", "lz4", "blosclz4"])
@pytest.mark.parametrize("drains", [True, False])
def test_what_is_stored_is_what_the_blocks_held(codec: str, drains: bool) -> None:
    choice = random.Random(len(codec))
    store = UnsteadyStore(len(codec))
    replica, lane = Replica(store, MemoryIndex(), seed=1, slabs=4), LateGathers()
    limits = SaveLimits(2, 6, PATIENCE_S, codec, "w")
    saver = replica.saver_of(limits, lane)
    held = defaultdict[str, list[list[bytes]]](list)
    asked = 0
    for step in range(STEPS):
        for cache in replica.caches:  # as soon as the step before may be forgotten
            cache.copy_(torch.randn(cache.shape).round())
        namespace = f"{step // 2:0{len(NAMESPACE)}x}"  # some chunks are saved twice
        chunks = choice.sample(range(4), choice.randint(1, 3))
        moves = [replica.move(c, 1 + 2 * i, base=c) for i, c in enumerate(chunks)]
        for move in moves:
            ids = list(move.block_ids)
            pages = [bytes(c[ids].view(torch.uint8).numpy().data) for c in replica.caches]
            held[replica.path(move.chunk).replace(NAMESPACE, namespace)].append(pages)
        saves = tuple(SaveMove(move, "0" * 64, None) for move in moves)
        saver.gather((SavePlan(f"r{step}", namespace, saves),))
        asked += len(saves)
        if step % 2:
            saver.fence()
        else:
            wait_until(lambda request=f"r{step}": saver.left_device(request))
    if drains:
        assert saver.drain(PATIENCE_S)
    saver.close(0.0)
    wait_until(lambda: replica.save_slabs.leased == 0)
    wait_until(lambda: sum(map(replica.recorder.value, ENDS)) == asked)
    for entry in store.scan(""):
        payload = store.get(entry.key)
        assert payload is not None
        header = read_header(payload)
        assert open_payload(payload, header.claim, replica.paged.layers) == header
        stored = []
        for i, nbytes in enumerate(replica.paged.layer_bytes):
            stored.append(bytes(frame_pages(header, i, payload, memoryview(bytearray(nbytes)))))
        assert stored in held[entry.key]
    lane.close()


class PassesWhenAsked(HostLane):
    """Its copies are made when somebody asks for the second time whether they are."""

    def __init__(self) -> None:
        self.left: list[tuple[PagedLayers, BlockRuns, Sequence[torch.Tensor]]] = []
        self.marks = 0

    def gather(self, layers: PagedLayers, placed: BlockRuns, pages: Sequence[torch.Tensor]) -> None:
        self.left.append((layers, placed, pages))

    def mark(self) -> "AskedMark":
        self.marks += 1
        return AskedMark(self, self.marks)

    def let_pass(self) -> None:
        left, self.left = self.left, []
        for work in left:
            super().gather(*work)


class AskedMark:
    def __init__(self, lane: PassesWhenAsked, number: int) -> None:
        self._lane = lane
        self.number = number
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        if self._asked > 3:  # when it was given, none is done
            self._lane.let_pass()
        return not self._lane.left

    def wait(self) -> None:
        raise AssertionError("a device that hangs would hold this thread for ever")

    def hold_compute(self) -> None:
        """The model waits, nobody else."""


class NobodyWaits:
    """Stands for the thread that waits for copies: what is queued stays so, and is left at the
    end."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.left: list[object] = []

    def put(self, items: Iterable[object]) -> bool:
        self.left += items if self.takes else []
        return self.takes

    def drain(self, _seconds: float) -> bool:
        return not self.left

    def close(self, *, give_up: Callable[[Iterable[object]], object]) -> None:
        give_up(self.left)


@ON_HOST
@pytest.mark.parametrize("takes", [True, False])
def test_no_slab_is_given_back_and_no_block_let_go_of_before_its_copies_have_passed(
    *, takes: bool
) -> None:
    """What is given up at the end may still be on its way out of its blocks, whose memory goes next
    where the engine sleeps."""
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenAsked()
    saver = replica.saver_of(SaveLimits(1, 6, PATIENCE_S, "none", "w"), lane)
    saver._gathered = NobodyWaits(takes=takes)  # type: ignore[assignment]
    saves = tuple(SaveMove(replica.move(c, 1), "0" * 64, None) for c in range(2))
    dropped = saver.gather((SavePlan("r", NAMESPACE, saves),))
    assert len(dropped) == (0 if takes else 2)
    assert lane.left
    assert ("2/4 leased" if takes else "2 pending") in repr(replica.save_slabs)
    saver.close(0.0)
    assert not lane.left
    wait_until(lambda: replica.save_slabs.free == 4)
    assert replica.recorder.value("save_drops") == 2


class HangsForEver(AskedMark):
    def done(self) -> bool:
        return False


@ON_HOST
def test_a_slab_that_a_hung_device_may_still_write_is_never_given_back() -> None:
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenAsked()
    lane.mark = lambda: HangsForEver(lane, 1)  # type: ignore[method-assign]
    saver = replica.saver_of(SaveLimits(1, 6, PATIENCE_S, "none", "w"), lane)
    saves = tuple(SaveMove(replica.move(c, 1), "0" * 64, None) for c in range(2))
    assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == set()
    saver.close(-10.0)  # the time to look is over
    assert saver.threads == 0
    assert replica.save_slabs.leased == 2
    assert replica.save_slabs.adds_up
    assert replica.recorder.value("save_drops") == 2


@ON_HOST
def test_a_chunk_that_the_device_does_not_copy_in_time_is_dropped() -> None:
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenAsked()
    lane.mark = lambda: HangsForEver(lane, 1)  # type: ignore[method-assign]
    saver = replica.saver_of(SaveLimits(1, 6, 0.05, "none", "w"), lane)
    saves = (SaveMove(replica.move(0, 1), "0" * 64, None),)
    assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == set()
    assert saver.drain(PATIENCE_S)
    assert replica.recorder.value("saves") == 0
    assert replica.recorder.value("save_drops") == 1
    assert not saver.left_device("r")
    assert replica.save_slabs.leased == 1, "the device may still write into it"
    saver.close(-10.0)


@ON_HOST
def test_chunks_that_the_device_copies_count_as_queued() -> None:
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=8), PassesWhenAsked()
    lane.mark = lambda: HangsForEver(lane, 1)  # type: ignore[method-assign]
    saver = replica.saver_of(SaveLimits(1, 3, PATIENCE_S, "none", "w"), lane)
    for chunks, dropped in ((range(2), set()), (range(2, 4), {("r", 3)})):
        saves = tuple(SaveMove(replica.move(c, 1), "0" * 64, None) for c in chunks)
        assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == dropped
    saver.close(-10.0)
    assert saver._copying == 0


@ON_HOST
@pytest.mark.parametrize("call", ["mark_compute", "follow", "place", "gather", "mark", "done"])
def test_a_device_that_fails_costs_drops_and_no_slab_is_reused(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the pool is gone: nothing shows what such a device still copies."""
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenAsked()

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(AskedMark if call == "done" else lane, call, fail)
    saver = replica.saver_of(SaveLimits(1, 6, PATIENCE_S, "none", "w"), lane)
    saves = tuple(SaveMove(replica.move(c, 1), "0" * 64, None) for c in range(2))
    assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == {("r", 0), ("r", 1)}
    assert replica.recorder.value("save_drops") == 2
    assert replica.save_slabs.leased == (0 if call in ("place", "gather") else 2)
    assert replica.save_slabs.adds_up
    monkeypatch.undo()
    assert len(saver.gather((SavePlan("next", NAMESPACE, saves),))) == 0, "they may be tried again"
    saver.close(PATIENCE_S)


@ON_HOST
def test_a_device_that_fails_while_it_copies_costs_drops() -> None:
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenAsked()

    class FailsLater(HangsForEver):
        def done(self) -> bool:
            if self._asked:
                raise RuntimeError("an illegal memory access was encountered")
            self._asked = 1
            return False

    lane.mark = lambda: FailsLater(lane, 1)  # type: ignore[method-assign]
    saver = replica.saver_of(SaveLimits(1, 6, PATIENCE_S, "none", "w"), lane)
    saves = (SaveMove(replica.move(0, 1), "0" * 64, None),)
    assert saver.gather((SavePlan("r", NAMESPACE, saves),)) == set()
    assert saver.drain(PATIENCE_S)
    assert replica.recorder.value("save_drops") == 1
    assert replica.save_slabs.leased == 1
    assert replica.save_slabs.adds_up
    saver.close(-10.0)


@ON_HOST
def test_computing_waits_only_for_saves_whose_blocks_are_reused() -> None:
    replica, lane = Replica(MemoryStore(), MemoryIndex(), seed=1, slabs=4), PassesWhenAsked()
    held: list[int] = []

    class Held(HangsForEver):
        def hold_compute(self) -> None:
            held.append(self.number)

    def mark() -> Held:
        lane.marks += 1
        return Held(lane, lane.marks)

    lane.mark = mark  # type: ignore[method-assign]
    saver = replica.saver_of(SaveLimits(1, 6, PATIENCE_S, "none", "w"), lane)
    for number, name in enumerate(("a", "b", "c")):
        saves = (SaveMove(replica.move(number, 1), "0" * 64, None),)
        saver.gather((SavePlan(name, NAMESPACE, saves),))
    saver.fence({"nobody"})
    assert held == []
    saver.fence({"a", "b"})
    assert held == [2]
    saver.fence()
    assert held == [2, 3]
    saver.close(-10.0)
