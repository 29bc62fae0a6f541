"""Speculative decoding: the draft's KV is shared like the target's, and replicas with and without
the draft share the target's."""

from pathlib import Path

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import BLOCK, CHUNK, SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Result, Settle
from tests.engine.pages import LOADED_PAGES
from tests.engine.prompts import prompt_of, tokens_of
from tests.engine.speculation import METHODS, make_pair

NEW_TOKENS = 24
LENGTHS = (300, 700)
PROMPTS = tuple(prompt_of(n, seed=n, max_tokens=NEW_TOKENS) for n in LENGTHS)
WHOLE = [n // CHUNK * CHUNK for n in LENGTHS]
LESS_ONE_BLOCK = [n - BLOCK for n in WHOLE]
"""vLLM drops the last block of each match of its own for drafts that continue hidden states."""
PAGES = Call(function=LOADED_PAGES, arguments={"prompts": [[*p.tokens, 5] for p in PROMPTS]})
ACCEPTED = Call(function="tests.engine.speculation:accepted")
CROWD = tuple(prompt_of(2 * CHUNK + 44, seed=i, max_tokens=108) for i in range(6))
TINY = {"num_gpu_blocks_override": 32, "max_model_len": 640}
ONE_BY_ONE = tuple(Generate(prompts=(prompt,)) for prompt in PROMPTS)
LONGER = prompt_of(LENGTHS[0] + 2 * CHUNK, seed=LENGTHS[0])


@scenario
def twice(folder: Path, method: str) -> Values:
    """A replica that computes prompts, forgets them, and loads them."""
    store = SharedStore(folder / "store")
    again = (Settle(), ResetPrefixCache(), *ONE_BY_ONE, PAGES, ACCEPTED)
    steps = (*ONE_BY_ONE, SAVED, PAGES, ACCEPTED, *again)
    run = run_replica(store.job(*steps, engine=make_pair(method)), folder)
    return {"run": run, "fields": sorted({path.stem for path in store.payloads()})}


IN_CI = ("draft_model", "eagle", "dflash")
each_method = pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=[] if one in IN_CI else pytest.mark.wide) for one in METHODS],
)


@each_method
def test_a_draft_loads_what_it_loads_without_one_less_the_block_that_vllm_gives_up(
    method: str,
) -> None:
    expected = WHOLE if method == "draft_model" else LESS_ONE_BLOCK
    assert twice(method)["run"].cached == [0, 0, *expected]


@each_method
def test_tokens_and_accepted_proposals_are_the_same_after_a_load(method: str) -> None:
    run: Result = twice(method)["run"]
    assert run.tokens[:2] == run.tokens[2:]
    computed, loaded = run.answers[2], run.answers[-1]
    assert [2 * count for count in computed] == loaded
    if method in ("draft_model", "eagle"):
        proposed, accepted = computed
        assert accepted >= 0.9 * proposed > 0


@each_method
def test_the_draft_reads_the_very_bytes_that_it_computed(method: str) -> None:
    run: Result = twice(method)["run"]
    for before, after, tokens in zip(run.answers[1], run.answers[-2], LESS_ONE_BLOCK, strict=True):
        assert len(before) == len(after) > 3
        for layer, digests in before.items():
            assert digests[: tokens // BLOCK] == after[layer][: tokens // BLOCK], layer
            assert len(set(digests)) == len(digests)


@each_method
def test_the_layers_of_target_and_draft_are_in_payloads_of_their_own(method: str) -> None:
    target, draft = sorted(twice(method)["fields"], key=len)
    assert target == ("0.L0-3_H0-4" if method == "mtp" else "0.L0-4_H0-4")
    number, _, shard = draft.partition(".")
    layers = {"draft_model": 4, "dflash": 2}.get(method, 1)
    assert (int(number) > 2**16, shard) == (True, f"L0-{layers}_H0-4")


@scenario
def mixed(folder: Path) -> Values:
    """Replicas with and without a draft of the same target."""
    store, other = SharedStore(folder / "store"), SharedStore(folder / "other")
    eagle = make_pair("eagle")
    plain = {"model": eagle["model"]}
    crowd = Generate(prompts=CROWD)
    values: Values = {
        "plain": run_replica(store.job(*ONE_BY_ONE, SAVED, crowd, engine=plain), folder)
    }
    # Continuing a prompt whose draft KV is missing, from the replica's own cache.
    steps = (ACCEPTED, *ONE_BY_ONE, ACCEPTED, Generate(prompts=(LONGER,)), SAVED)
    values["drafted"] = run_replica(store.job(*steps, engine=eagle), folder)
    values["stored"] = [path.stem for path in store.payloads()]
    crowded = eagle | TINY | {"async_scheduling": True}
    values["crowded"] = run_replica(other.job(crowd, SAVED, engine=crowded), folder)
    steps = (Settle(), ResetPrefixCache(), *(Generate(prompts=(one,)) for one in CROWD))
    values["reader"] = run_replica(other.job(*steps, engine=plain), folder)
    steps = (ACCEPTED, *steps, ACCEPTED)
    values["drafted reader"] = run_replica(other.job(*steps, engine=eagle), folder)
    values["alone"] = run_replica(Job(steps=(*steps, ACCEPTED), engine=eagle), folder)
    return values


@pytest.mark.wide
def test_a_replica_with_a_draft_loads_what_one_without_stored() -> None:
    plain, drafted = mixed()["plain"], mixed()["drafted"]
    assert drafted.cached[:2] == LESS_ONE_BLOCK
    assert drafted.tokens[:2] == plain.tokens[:2]


@pytest.mark.wide
def test_a_replica_without_a_draft_loads_what_one_with_stored() -> None:
    assert mixed()["reader"].cached == [2 * CHUNK] * len(CROWD)
    assert mixed()["reader"].tokens == mixed()["plain"].tokens[2:]


@pytest.mark.wide
def test_nothing_is_stored_of_a_draft_that_continues_without_earlier_kv() -> None:
    """Not even later chunks, whose beginning is in the replica's own cache."""
    assert mixed()["drafted"].cached[2] >= LENGTHS[0] // BLOCK * BLOCK - BLOCK
    assert set(mixed()["stored"]) == {"0.L0-4_H0-4"}
    chunks = sum(WHOLE) // CHUNK + 2 * len(CROWD) + 2
    assert len(mixed()["stored"]) == chunks


@pytest.mark.wide
def test_preempted_and_asynchronous_steps_store_only_verified_bytes() -> None:
    crowded, drafted = mixed()["crowded"], mixed()["drafted reader"]
    assert crowded.metrics["vllm:num_preemptions"] > 0
    assert crowded.tokens == mixed()["plain"].tokens[2:]
    assert drafted.tokens == crowded.tokens
    assert drafted.cached == [2 * CHUNK - BLOCK] * len(CROWD)


@pytest.mark.wide
def test_as_many_proposals_are_accepted_as_without_objkv() -> None:
    loaded, alone = mixed()["drafted reader"].answers[-1], mixed()["alone"].answers[-1]
    assert loaded == alone
    assert alone[1] > 0.9 * alone[0] > 0


@pytest.mark.wide
def test_a_prompt_continues_past_what_the_draft_has() -> None:
    assert LONGER.tokens[: LENGTHS[0]] == tokens_of(LENGTHS[0], seed=LENGTHS[0])
