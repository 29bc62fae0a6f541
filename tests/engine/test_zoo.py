"""A saves, B loads: the same tokens as without objkv, so many of them loaded, the very bytes.

What the two replicas are is told by ``table``: models, shapes, dtypes, drafts, settings, roles.
"""

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from objkv.codec.payload import read_header
from objkv.keys.prefix import PromptExtras, prefix_hashes
from tests.engine import model, pages, speculation
from tests.engine.fleet import CHUNK, NUMBERS_TOLD, RESET, SAVED, SETTLED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Job, Prompt, Result, Step, call, generate
from tests.engine.table import Cached, Row, Side, rows

pytestmark = pytest.mark.slow
ROWS = rows()
LATENT_BLOCK = 16
"""What vLLM's backend for latents makes of the wish for 32."""


def job_of(row: Row, side: Side, store: SharedStore, prompts: Sequence[Prompt]) -> Job:
    """Each prompt alone in its steps, and nothing is found in the replica's own cache. After each
    a look at what can be loaded of it."""
    loaded, steps = cached_of(row), list[Step]()
    looks = {"cached": pages.cached_pages, "heads": pages.cached_heads}
    if row.look == "request":
        steps.append(call(pages.watch_pages))
    for prompt in prompts:
        steps.append(generate(prompt))
        if row.look in looks and loaded.get(prompt):
            steps.append(call(looks[row.look], prompts=[prompt.tokens[: loaded[prompt] + 1]]))
        steps += (*(() if side.connect else (SAVED,)), SETTLED, RESET)
    if row.look == "request":
        steps.append(call(pages.request_pages))
    steps += (NUMBERS_TOLD, call(speculation.accepted))
    settings = {
        name: value.format(folder=store.folder.parent) if isinstance(value, str) else value
        for name, value in side.settings.items()
    }
    engine = row.engine() | side.engine
    shape = {"ranks": side.ranks, "stages": side.stages}
    job = store.job(*steps, kv_role=side.kv_role, engine=engine, **shape, **settings)
    changed: dict[str, Any] = {"model": row.model}
    if side.connect is not None:
        changed["connector"] = side.connect(store)
    return job.model_copy(update=changed)


@functools.cache
def alone(name: str) -> tuple[int, dict[Prompt, tuple[int, ...]]]:
    """vLLM without objkv: the tokens of a block, and what it generates for each of B's prompts."""
    row = ROWS[name]
    model.make_adapters()
    steps = [step for prompt in row.asked for step in (generate(prompt), SETTLED, RESET)]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            steps=(call(pages.block_tokens), *steps),
            model=row.model,
            engine=row.engine() | row.b.engine,
        )
        run = run_replica(job, Path(folder))
    return run.answers[0], dict(zip(row.asked, run.tokens, strict=True))


def cached_of(row: Row) -> dict[Prompt, int]:
    """How many tokens of each prompt B loads; those of the last time where it asks twice."""
    return dict(zip(row.asked, expected_of(row), strict=True))


def expected_of(row: Row) -> Cached:
    """How many tokens B loads each time it is asked."""
    return row.cached if isinstance(row.cached, tuple) else row.cached(alone(row.name)[0])


@contextmanager
def saved(row: Row) -> Iterator[tuple[SharedStore, Result]]:
    with tempfile.TemporaryDirectory(prefix="objkv-zoo-") as folder:
        for name, text in row.files.items():
            path = Path(folder, name)
            path.write_text(text)
            path.chmod(0o600)
        store = SharedStore(Path(folder, "store"))
        alone(row.name)  # all models are made
        yield store, run_replica(job_of(row, row.a, store, row.saved or row.asked), Path(folder))


@pytest.mark.parametrize("name", ROWS)
def test_b_loads_what_a_saved(name: str) -> None:
    row = ROWS[name]
    with saved(row) as (store, a):
        payloads = len(store.payloads())
        assert not row.stems or stems_of(store) == set(row.stems)
        assert not row.layers or layers_of(store) == set(row.layers)
        b = run_replica(job_of(row, row.b, store, row.asked), store.folder.parent)
        assert row.adds is None or len(store.payloads()) == payloads + row.adds
        assert len(store.namespaces()) == row.namespaces
    assert a.cached[0] == 0
    cached = expected_of(row)
    assert tuple(b.cached[: len(cached)]) == cached
    check_tokens(row, b, row.asked, b.cached)
    if row.a.engine == row.b.engine:
        check_tokens(row, a, row.saved or row.asked, a.cached)
    if row.look:
        check_bytes(row, pages_of(row, a, row.saved or row.asked), pages_of(row, b, row.asked))
    if row.accepts is not None:
        proposed, accepted = b.answers[-1]
        assert [proposed, accepted] == a.answers[-1]
        assert proposed > 0
        assert accepted >= row.accepts * proposed
    counted = {k.partition("objkv_")[2] for k, v in b.metrics.items() if "objkv_" in k and v}
    assert row.counted <= counted
    assert row.counted or not {one for one in counted if "fail" in one or "corrupt" in one}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.spoils])
def test_a_flipped_bit_is_computed_and_saved_again(name: str) -> None:
    row = ROWS[name]
    with saved(row) as (store, _):
        for prompt, pattern in zip(reversed(row.saved or row.asked), row.spoils, strict=False):
            spoil(store, row, prompt, pattern)
        job = job_of(row, row.b, store, row.asked)
        second, third = (run_replica(job, store.folder.parent) for _ in range(2))
    for run in (second, third):
        check_tokens(row, run, row.asked, run.cached)
    corrupt = [
        sum(n for metric, n in run.metrics.items() if metric.endswith("load_corrupt"))
        for run in (second, third)
    ]
    assert corrupt[0] >= len(row.spoils)
    assert corrupt[1] == 0
    expected = list(cached_of(row).values())
    missing = [n - (third.cached[i] or 0) for i, n in enumerate(expected)]
    assert max(missing) <= 0, (missing, second.metrics, second.agent)


def spoil(store: SharedStore, row: Row, prompt: Prompt, pattern: str) -> None:
    """Flip a bit near the end of payloads, where only a frame's own checksum sees it."""
    digest = "*"
    if pattern != "*":  # of the last chunk of this prompt
        chunk = row.a.settings.get("chunk_tokens", CHUNK)
        chunk = chunk if isinstance(row.cached, tuple) else alone(row.name)[0]
        (namespace,) = store.namespaces()
        hashes = prefix_hashes(namespace, prompt.tokens, chunk, PromptExtras())
        digest = hashes[cached_of(row)[prompt] // chunk - 1].hex()
    paths = list(store.bulk.glob(f"*/*/{digest}/{pattern}.safetensors"))
    assert paths
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)


def check_tokens(
    row: Row, run: Result, prompts: Sequence[Prompt], cached: Sequence[int | None]
) -> None:
    expected = alone(row.name)[1]
    for prompt, found, count in zip(prompts, run.tokens, cached, strict=False):
        if prompt in expected and (row.tokens == "all" or (row.tokens == "computed" and not count)):
            assert found == expected[prompt], len(prompt.tokens)
    assert {output.finish_reason for outputs in run.outputs for output in outputs} == {"length"}
    if row.tokens == "all":
        assert len(set(expected.values())) > len(expected) // 2, "tokens are evidence"


def pages_of(row: Row, run: Result, prompts: Sequence[Prompt]) -> dict[Prompt, Any]:
    cached = cached_of(row)
    lists = [answer for answer in run.answers if isinstance(answer, list)]
    found = [held for answer in lists for held in answer if isinstance(held, dict)]
    return dict(zip([p for p in prompts if cached.get(p)], found, strict=True))


def check_bytes(row: Row, computed: dict[Prompt, Any], loaded: dict[Prompt, Any]) -> None:
    """That what was loaded is what was computed, of what both were asked."""
    cached, both = cached_of(row), computed.keys() & loaded.keys()
    assert both
    for prompt in both:
        layers = computed[prompt].keys() & loaded[prompt].keys()
        assert layers
        for layer in layers:
            end = min(len(computed[prompt][layer]), len(loaded[prompt][layer]))
            end = cached[prompt] // LATENT_BLOCK if row.look == "request" else end
            assert computed[prompt][layer][:end] == loaded[prompt][layer][:end], layer
            assert loaded[prompt][layer][:end][-1], layer


def layers_of(store: SharedStore) -> set[str]:
    """Dtype and scales of all tensors in its payloads."""
    headers = [read_header(path.read_bytes()) for path in store.payloads()]
    layers = {layer for header in headers for layer in header.frames.layers}
    return {f"{layer.dtype} {layer.scales or ''}".strip() for layer in layers}


def stems_of(store: SharedStore) -> set[str]:
    """Names of its payloads; the number of a draft's group is made of the draft's identity."""
    stems = [path.stem.partition(".") for path in store.payloads()]
    return {("draft" if int(group) > 2**16 else group) + dot + rest for group, dot, rest in stems}
