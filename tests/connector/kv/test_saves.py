"""Which chunks a step completes, whose blocks may be saved, and when blocks may be reused."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput

from objkv.connector.kv.metadata import StepReport
from objkv.connector.kv.requests import TrackedRequest
from objkv.connector.kv.saves import BlockHeadroom, BlockTrust, DraftGaps
from objkv.connector.model.groups import Geometry
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PrefixChain, PromptExtras
from tests.connector.kv.test_draft_world import CHUNK, NAMESPACE, geometry
from tests.support.sides import GEOMETRY, SIZE, ask, request, scheduler_side, step

# Whose blocks may be saved.


def admitted(*, computed: int, accounted: int) -> TrackedRequest:
    of_vllm = cast("Any", SimpleNamespace(num_computed_tokens=computed))
    return TrackedRequest(of_vllm, "n" * 32, accounted=accounted)


def schedule(trust: BlockTrust, *fresh: TrackedRequest, sync: bool) -> None:
    for tracked in fresh:
        trust.add(tracked)
    trust.next_step(cast("Any", SimpleNamespace(has_sync_kv_loads=sync)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_objkv_loads_within_a_step_is_doubted_with_several_ranks(ranks: int) -> None:
    """A rank whose load succeeded does not know that another's failed, and would save the rest."""
    trust, own = BlockTrust(1, ranks=ranks), admitted(computed=512, accounted=512)
    schedule(trust, own, sync=True)
    assert trust.trusts(own) is (ranks == 1)
    schedule(trust, sync=False)
    assert trust.trusts(own)


def test_requests_that_may_share_such_blocks_are_doubted_with_them() -> None:
    trust = BlockTrust(2)
    running, theirs = admitted(computed=64, accounted=64), admitted(computed=512, accounted=0)
    beside, next_one = admitted(computed=256, accounted=256), admitted(computed=256, accounted=256)
    schedule(trust, running, sync=False)
    schedule(trust, theirs, beside, sync=True)
    schedule(trust, next_one, sync=False)
    assert trust.trusts(running)
    assert not any(trust.trusts(x) for x in (theirs, beside, next_one))
    schedule(trust, sync=False)
    assert all(trust.trusts(x) for x in (theirs, beside, next_one))


def test_after_a_step_that_was_not_understood_nothing_is_trusted_until_its_result() -> None:
    trust, running = BlockTrust(1), admitted(computed=64, accounted=64)
    schedule(trust, running, sync=False)
    fresh, next_one, later = (admitted(computed=64, accounted=64) for _ in range(3))
    trust.add(fresh)
    trust.next_step(None)
    schedule(trust, next_one, sync=False)
    assert [trust.trusts(one) for one in (running, fresh, next_one)] == [True, False, False]
    schedule(trust, later, sync=False)
    assert all(trust.trusts(one) for one in (fresh, next_one, later))


# Which chunks a step completes: as if every request were examined in every step.


class Engine:
    """Schedules requests as vLLM does, and knows what each step should save."""

    def __init__(self, *, save_decode: bool) -> None:
        roles = {"steps_in_flight": 2}
        self.side = scheduler_side(roles=roles, save_decode=save_decode)
        self.save_decode = save_decode
        self.running: dict[str, Any] = {}
        self.preempted: dict[str, Any] = {}
        self.planned: dict[str, int] = {}
        self.again: dict[str, set[int]] = {}
        self.number = 0

    def arrive(self, tokens: int) -> None:
        self.number += 1
        # Each prompt is another one: nothing of it is stored.
        one = request([self.number] * tokens, f"r{self.number}")
        ask(self.side, one)
        self.planned[one.request_id], self.again[one.request_id] = 0, set()
        self.admit(one)

    def admit(self, one: Any, computed: int = 0) -> None:
        self.side.plan_load(one, (), 0)
        one.num_computed_tokens = computed
        self.running[one.request_id] = one

    def preempt(self, name: str) -> None:
        one = self.preempted[name] = self.running.pop(name)
        one.num_computed_tokens = 0

    def resume(self, name: str, computed: int) -> None:
        """With a part of it in vLLM's prefix cache, possibly more than it had computed."""
        one = self.preempted.pop(name)
        self.admit(one, min(computed, len(one.all_token_ids) - 1))

    def reject(self, name: str, tokens: int) -> None:
        """Speculated tokens that the model did not accept."""
        one = self.running[name]
        one.num_computed_tokens = max(0, one.num_computed_tokens - tokens)

    def generate(self, name: str, tokens: int) -> None:
        one = self.running[name]
        one.all_token_ids.extend([1] * tokens)
        one.num_tokens += tokens

    def drop(self, name: str, chunk: int) -> None:
        """A save that the worker could not take."""
        if chunk < self.planned[name]:
            self.again[name].add(chunk)
            report = StepReport(dropped={(name, chunk)})
            self.side.update(KVConnectorOutput(kv_connector_worker_meta=report))

    def end(self, name: str) -> None:
        self.side.finish(self.running.pop(name), ([1],))

    def step(self, scheduled: dict[str, int]) -> None:
        plan = self.side.plan_step(step(scheduled, range(1, 1000)))
        saved = {save.request_id: [m.move.chunk for m in save.moves] for save in plan.saves}
        due = {name: self._due(name, count) for name, count in scheduled.items()}
        assert saved == {name: chunks for name, chunks in due.items() if chunks}
        self.side.end_step()
        for name, count in scheduled.items():
            self.running[name].num_computed_tokens += count

    def _due(self, name: str, count: int) -> list[int]:
        one = self.running[name]
        known = len(one.all_token_ids) if self.save_decode else one.num_prompt_tokens
        whole = min(one.num_computed_tokens + count, known) // SIZE
        again = {chunk for chunk in self.again[name] if chunk < whole}
        self.again[name] -= again
        chunks = again | set(range(self.planned[name], whole))
        self.planned[name] = max(self.planned[name], whole)
        return sorted(chunks)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.booleans())
def test_every_chunk_is_saved_in_the_step_that_completes_it(
    data: st.DataObject, save_decode: bool
) -> None:
    engine = Engine(save_decode=save_decode)
    try:
        for _ in range(data.draw(st.integers(1, 12), label="steps")):
            for _ in range(data.draw(st.integers(0, 2), label="arrivals")):
                # The first hash of a shorter one is computed on another thread, and may be late.
                engine.arrive(data.draw(st.integers(SIZE, 4 * SIZE), label="prompt"))
            for name in list(engine.preempted):
                if data.draw(st.booleans(), label="resumed"):
                    engine.resume(name, data.draw(st.integers(0, 3), label="hit") * SIZE)
            for name in list(engine.running):
                match data.draw(st.integers(0, 12), label="event"):
                    case 0:
                        engine.preempt(name)
                    case 1:
                        engine.reject(name, data.draw(st.integers(1, 8)))
                    case 2:
                        engine.drop(name, data.draw(st.integers(0, 3)))
                    case 3:
                        engine.end(name)
                    case _:
                        engine.generate(name, data.draw(st.integers(0, 4)))
            counts = st.one_of(st.just(1), st.integers(1, 3), st.integers(1, 2 * SIZE))
            names = data.draw(st.permutations(sorted(engine.running)), label="order")
            keep = data.draw(st.integers(0, len(names)), label="scheduled")
            engine.step({name: data.draw(counts) for name in names[:keep]})
    finally:
        engine.side.close()


def test_a_request_that_generates_is_examined_when_it_completes_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds generate at once, and to look at each in each step takes longer than the rest."""
    engine = Engine(save_decode=True)
    engine.arrive(SIZE)
    engine.step({"r1": SIZE})
    looked: list[int] = []
    plan_due = engine.side._saves._plan_due
    one = engine.running["r1"]

    def counted(output: Any, tracked: TrackedRequest) -> Any:
        looked.append(one.num_computed_tokens)
        return plan_due(output, tracked)

    monkeypatch.setattr(engine.side._saves, "_plan_due", counted)
    for _ in range(2 * SIZE):
        engine.generate("r1", 1)
        engine.step({"r1": 1})
    assert looked == [2 * SIZE - 1, 3 * SIZE - 1]


def test_a_request_that_ended_is_not_kept_until_it_would_have_been_examined() -> None:
    """vLLM's request contains its tokens and images, and hundreds end in the meantime."""
    engine = Engine(save_decode=True)
    engine.arrive(SIZE)
    engine.running["r1"].pixels = {1}
    pixels = weakref.ref(engine.running["r1"].pixels)
    engine.step({"r1": SIZE})
    engine.end("r1")
    engine.step({})
    gc.collect()
    assert pixels() is None


def test_a_request_whose_save_cannot_be_planned_stops_no_other_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = scheduler_side()
    names = ("a", "b", "c")
    for name in names:
        ask(side, one := request([ord(name)] * SIZE, name))
        side.plan_load(one, (), 0)
    plan = side._saves._plan_due

    def failing(output: Any, tracked: TrackedRequest, *more: Any) -> Any:
        return 1 / 0 if tracked.request.request_id == "b" else plan(output, tracked, *more)

    monkeypatch.setattr(side._saves, "_plan_due", failing)
    saves = side.plan_step(step(dict.fromkeys(names, SIZE), [1])).saves
    assert {save.request_id for save in saves} == {"a", "c"}


# Whether the next step may give blocks of running requests to others.

WINDOW = GroupIdentity("sliding_window", 64, ("w",), heads=1, content=8, block_size=SIZE)
REQUESTS_MAX, TOKENS_MAX = 4, 10 * SIZE + 1


def headroom(
    free: int | None,
    *,
    geometry: Geometry = GEOMETRY,
    zeroes: bool | None = False,
    ahead: int | None = None,
) -> BlockHeadroom:
    """``free``: how many blocks are free, None if the connector is not bound to a manager."""
    limits = SimpleNamespace(max_num_batched_tokens=TOKENS_MAX, max_num_seqs=REQUESTS_MAX)
    speculative = ahead and SimpleNamespace(num_speculative_tokens=ahead)
    of_vllm = SimpleNamespace(scheduler_config=limits, speculative_config=speculative)
    own = [SimpleNamespace(kv_cache_spec=group) for group in geometry.groups]
    zeroing = {} if zeroes is None else {"needs_kv_cache_zeroing": zeroes}
    caches = SimpleNamespace(kv_cache_groups=own, **zeroing)
    pool = SimpleNamespace(get_num_free_blocks=lambda: free)
    manager = None if free is None else SimpleNamespace(block_pool=pool)
    return BlockHeadroom(cast("Any", of_vllm), cast("Any", caches), geometry, lambda: manager)


NEEDED = 11 + REQUESTS_MAX
"""Blocks of ten chunks and one token, and a new one of each request."""


@pytest.mark.parametrize(
    ("one", "short"),
    [
        (headroom(NEEDED), False),
        (headroom(NEEDED - 1), True),
        (headroom(NEEDED, ahead=1), True),
        (headroom(NEEDED + REQUESTS_MAX, ahead=SIZE), False),
        (headroom(None), True),
        (headroom(10**6, zeroes=True), True),
        (headroom(10**6, zeroes=None), True),
        (headroom(10**6, geometry=Geometry((WINDOW,), SIZE, SIZE, tp_size=1)), True),
    ],
)
def test_blocks_may_be_reused_unless_enough_are_free_for_any_step(
    one: BlockHeadroom, short: bool
) -> None:
    assert one.is_short() is short


def test_a_plan_tells_whether_blocks_may_be_reused_and_whose_are() -> None:
    answers = iter((True, False))
    side = scheduler_side(may_reuse=lambda: next(answers))
    side.track(request(name="a"))
    output = step({}, ())
    output.preempted_req_ids = {"b"}
    plan = side.plan_step(output)
    assert (plan.may_reuse, plan.reused) == (True, {"b"})
    output.preempted_req_ids = None  # unknown: any may be preempted
    plan = side.plan_step(output)
    assert (plan.may_reuse, plan.reused) == (False, {"a"})


# What may be stored of a draft after a load that found only the target's KV.


SHAPE = geometry(None, draft=True)


def tracked(tokens: list[int], local: int = 0) -> TrackedRequest:
    chain = PrefixChain(NAMESPACE, CHUNK, PromptExtras(), digests=True)
    chain.extend(tokens, len(tokens) // CHUNK * CHUNK)
    request = cast("Any", SimpleNamespace(request_id=f"{tokens[-1]}"))
    one = TrackedRequest(request, NAMESPACE, local_tokens=local)
    one.hashes = cast("Any", SimpleNamespace(chain=chain))
    return one


ONE, TWO = [1] * (5 * CHUNK), [2] * (5 * CHUNK)


@pytest.mark.parametrize(
    ("tokens", "local", "chunk", "complete"),
    [
        (ONE, 0, 4, True),
        (ONE, CHUNK, 4, True),
        (ONE, 2 * CHUNK, 4, True),
        (ONE, 2 * CHUNK + 2, 4, False),
        (ONE, 4 * CHUNK, 4, False),
        # Prompts that go on differently may share blocks inside the chunk with the gap.
        (ONE[: 2 * CHUNK] + TWO[2 * CHUNK :], 2 * CHUNK, 4, True),
        (ONE[: 2 * CHUNK + 4] + TWO[2 * CHUNK + 4 :], 2 * CHUNK + 4, 4, False),
        (ONE[: 4 * CHUNK] + TWO[4 * CHUNK :], 4 * CHUNK, 4, False),
        (TWO, 4 * CHUNK, 4, True),
        # Hashes behind the gap may still be computed when the first chunks are saved.
        (ONE[: 2 * CHUNK], 5 * CHUNK, 1, True),
        (ONE[: 3 * CHUNK], 5 * CHUNK, 2, False),
    ],
)
def test_what_vllm_has_beyond_a_gap_of_the_draft_is_not_continued(
    tokens: list[int], local: int, chunk: int, complete: bool
) -> None:
    """After a load of ``ONE`` whose draft was stored up to the end of the second chunk."""
    gaps = DraftGaps(SHAPE)
    gaps.lost(one := tracked(ONE), 2 * CHUNK)
    assert not gaps.is_complete(one, 4), "the request itself stores nothing"
    assert gaps.is_complete(tracked(tokens, local), chunk) is complete
