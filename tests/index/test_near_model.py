"""Whatever happens in whatever order, the near cache returns a state of a short while ago."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.index.base import Shards
from objkv.index.memory import MemoryIndex
from objkv.index.near import SETTLE_S, NearIndex
from tests.contracts.clock import ManualClock
from tests.contracts.index_contract import FIELD, NAMESPACE, chunk, prefix_hash, shard
from tests.index.flaky_index import FlakyIndex

TTL_S, MISS_TTL_S, FOREVER_S = 30.0, 1.0, 10**9
NUMBERS = (1, 2, 3)


@dataclass
class Truth:
    """The index's records of one chunk, and when it held them; both in order of time."""

    held: list[tuple[Shards | None, float]] = field(default_factory=list)
    """The record, and until when it was valid; infinity for the current one."""
    told_of: int = 0
    """Position in ``held`` when this process last changed or doubted it."""

    def now(self, shards: Shards | None, now_s: float) -> None:
        if self.held:
            self.held[-1] = (self.held[-1][0], now_s)
        self.held.append((shards, float("inf")))

    def allows(self, answer: Shards | None, now_s: float) -> bool:
        ttl_s = MISS_TTL_S if answer is None else TTL_S
        return any(
            shards == answer and until_s > now_s - ttl_s
            for shards, until_s in self.held[self.told_of :]
        )


class World:
    def __init__(self, records_max: int) -> None:
        self.clock = ManualClock()
        self.far = MemoryIndex(clock=self.clock)
        self.inner = FlakyIndex(self.far)
        self.near = NearIndex(
            self.inner,
            records_max=records_max,
            ttl_s=TTL_S,
            miss_ttl_s=MISS_TTL_S,
            fields=[FIELD],
            clock=self.clock,
        )
        self.clock.advance(SETTLE_S)
        self.truth = {number: Truth([(None, float("inf"))]) for number in NUMBERS}

    def _set(self, number: int, nbytes: int | None) -> None:
        shards = None if nbytes is None else {FIELD: shard(nbytes)}
        self.truth[number].now(shards, self.clock())

    def _told(self, number: int) -> None:
        self.truth[number].told_of = len(self.truth[number].held) - 1

    def publish(self, number: int, nbytes: int) -> None:
        self.near.publish(chunk(number), {FIELD: shard(nbytes)}, ttl_s=FOREVER_S)
        self._set(number, nbytes)
        self._told(number)

    def forget(self, number: int, nbytes: int) -> None:
        if self.near.forget(NAMESPACE, prefix_hash(number), FIELD, shard(nbytes)):
            self._set(number, None)
        self._told(number)

    def invalidate(self, number: int, _: int) -> None:
        self.near.invalidate(NAMESPACE, prefix_hash(number))
        self._told(number)

    def clear(self, _number: int, _: int) -> None:
        self.near.clear()
        for number in NUMBERS:
            self._told(number)

    def publish_elsewhere(self, number: int, nbytes: int) -> None:
        self.far.publish(chunk(number), {FIELD: shard(nbytes)}, ttl_s=FOREVER_S)
        self._set(number, nbytes)

    def drop_elsewhere(self, number: int, _: int) -> None:
        if self.far.drop(NAMESPACE, prefix_hash(number)):
            self._set(number, None)

    def wait(self, number: int, _: int) -> None:
        self.clock.advance((0.3, 1.0, 29.0)[number - 1])

    def find(self, first: int, meanwhile: Callable[[], None]) -> None:
        """Ask for chunks from ``first`` on; something else happens once the index has answered."""
        numbers = [number for number in NUMBERS if number >= first]
        before = {number: Truth(list(t.held), t.told_of) for number, t in self.truth.items()}
        now_s, self.inner.after = self.clock(), meanwhile
        hashes = [prefix_hash(number) for number in numbers]
        found = self.near.find(NAMESPACE, hashes, [FIELD])
        self.inner.after = lambda: None
        for number, shards in zip(numbers, found, strict=True):
            assert before[number].allows(shards, now_s)
            if shards is None:
                break  # the later chunks are useless


OPS = ("publish", "forget", "invalidate", "clear", "publish_elsewhere", "drop_elsewhere", "wait")
op = st.tuples(st.sampled_from(OPS), st.sampled_from(NUMBERS), st.integers(1, 2))


Op = tuple[str, int, int]


@settings(max_examples=300)
@given(
    st.sampled_from((0, 1, 8)),
    st.lists(st.tuples(op, st.sampled_from(NUMBERS), st.lists(op, max_size=3)), max_size=20),
)
def test_nothing_is_believed_longer_than_its_time_or_after_this_process_knew_better(
    records_max: int, happenings: list[tuple[Op, int, list[Op]]]
) -> None:
    world = World(records_max)

    def happen(ops: list[Op]) -> None:
        world.inner.after = lambda: None
        for name, number, nbytes in ops:
            getattr(world, name)(number, nbytes)

    for before, first, during in happenings:
        happen([before])
        world.find(first, lambda ops=during: happen(ops))  # type: ignore[misc]
        world.find(first, lambda: None)
