"""Random mixes of groups under vLLM's own scheduler: whatever is read is what was computed.

The model of ``hybrid_engine`` looks at every token's KV, and at every state, before it goes on from
there.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import version as vllm_version

from objkv.cache.match import payloads_of, stored_blocks
from objkv.keys.identity import GroupIdentity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.transfer.plan import LoadOutcome
from tests.connector.kv.hybrid_engine import Answer, Engine, said
from tests.connector.kv.hybrid_layout import Layout

PROMPT_MAX, NEW_TOKENS = 60, 5
KINDS = ("full", "mla", "mamba", "sliding_window", "chunked_local")
LATENT_KINDS = ("mla", "sparse", "window_mla", "compressed", "ring")
MIXES = (
    Layout((("full", 0),), (4,)),
    Layout((("mla", 0),), (4,)),
    Layout((("sliding_window", 9),), (4,)),
    Layout((("chunked_local", 12),), (4,)),
    Layout((("mamba", 0),), (4,)),
    Layout((("full", 0), ("sliding_window", 17)), (4, 2)),
    Layout((("full", 0), ("sliding_window", 5), ("sliding_window", 5)), (4, 4, 4)),
    Layout((("full", 0), ("chunked_local", 12)), (4, 4)),
    Layout((("full", 0), ("chunked_local", 8)), (4, 4)),
    Layout((("full", 0), ("mamba", 0), ("mamba", 0)), (4, 4, 4)),
    Layout((("full", 0), ("mamba", 0), ("sliding_window", 9)), (4, 8, 2)),
    Layout((("mla", 0), ("mamba", 0)), (8, 8)),
    Layout((("sparse", 0),), (4,)),
    Layout((("window_mla", 9), ("sparse", 0)), (4, 8)),
    Layout((("window_mla", 8), ("compressed", 4), ("window_mla", 8)), (4, 8, 2)),
    Layout((("compressed", 4), ("ring", 4)), (8, 8)),
    Layout((("replayed", 8), ("compressed", 4), ("ring", 4)), (4, 8, 8)),
)


@contextmanager
def place() -> Iterator[Path]:
    """A folder for stores; hypothesis runs a test many times with one ``tmp_path``."""
    with TemporaryDirectory(prefix="objkv-hybrid-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def ask(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Run prompts at once; their answers must be right."""
    answers = engine.run(prompts, max_tokens=NEW_TOKENS)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer.tokens, answer.reason) == (said(prompt, NEW_TOKENS), "length")
    engine.save_all()
    return answers


def best_end(engine: Engine, folder: Path, prompt: Sequence[int]) -> int:
    """The longest prefix, in tokens, whose every read is in some payload; token by token."""
    identities, size = engine.geometry.groups, engine.geometry.chunk_tokens
    (namespace,) = (path.parent.name for path in folder.glob("chunks/*/identity.json"))
    hashes = prefix_hashes(namespace, prompt, size, PromptExtras())

    def has(g: int, token: int) -> bool:
        digest = hashes[token // size].hex()
        group = identities[g]
        held_from = (token // size + 1) * size - stored_blocks(group, size) * group.block_size
        stored = (folder / "chunks" / namespace / digest[:2] / digest).glob("*.safetensors")
        return token >= held_from and bool(payloads_of([one.stem for one in stored], g, group))

    def reads(group: GroupIdentity, end: int) -> list[int]:
        window = group.window or 0
        return [
            token
            for token in range(end)
            if group.kind in ("full", "mla")
            or (group.kind == "sliding_window" and end - token < window)
            or (group.kind == "chunked_local" and token // window == end // window)
            or (group.kind == "mamba" and token == end - 1)
        ]

    ends = range(0, len(prompt), size)
    forgetful = {"sliding_window", "window_mla", "chunked_local", "mamba", "ring"}
    if not forgetful & {kind for kind, _ in engine.layout.kinds}:
        ends = range(0, len(prompt) + 1, size)
    return max(
        end
        for end in ends
        if all(has(g, token) for g, group in enumerate(identities) for token in reads(group, end))
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Mixes that vLLM takes: with chunked local attention all blocks are of one size, which divides
    its chunks."""
    known = draw(st.sampled_from((KINDS, LATENT_KINDS)))
    names = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))
    if set(names) == {"chunked_local"}:
        names.append("full")
    if "ring" in names and "compressed" not in names:
        names.insert(0, "compressed")
    one = draw(st.sampled_from((2, 4, 8)))
    ratio = draw(st.sampled_from((2, 4)))

    def window(name: str) -> int:
        if name == "chunked_local":
            return one * draw(st.integers(1, 32 // one))
        if name in ("compressed", "ring"):
            return ratio
        return draw(st.integers(2, 30)) if name in ("sliding_window", "window_mla") else 0

    kinds = tuple((name, window(name)) for name in names)
    mixed = "chunked_local" not in names and draw(st.booleans())

    def size(name: str) -> int:
        if name in ("compressed", "ring"):  # whole states per block, and room for more than one
            return 8
        return draw(st.sampled_from((2, 4, 8))) if mixed and name != "mamba" else one

    sizes = tuple(size(name) for name in names)
    longest = PROMPT_MAX + NEW_TOKENS
    need = 1 + sum(-(-longest // size) + 3 for size in sizes)
    retention = draw(st.sampled_from((None, 0, 2 * lcm(*sizes))))
    if not {"sliding_window", "mamba"} & set(names):
        retention = None
    return Layout(
        kinds,
        sizes,
        chunk_tokens=draw(st.sampled_from((1, 8, 16))),
        # vLLM waits for ever if loads of several requests leave none of them enough blocks.
        num_blocks=need * (1 if known is KINDS else 4) + draw(st.integers(0, 2 * need)),
        step_tokens=draw(st.sampled_from((16, 24, 64))),
        retention=retention,
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    source = random.Random(draw(st.integers(0, 1 << 30)))
    known: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, 4))):
        before = draw(st.sampled_from(known))
        kept = before[: draw(st.integers(0, len(before)))]
        length = draw(st.integers(max(1, len(kept)), PROMPT_MAX))
        known.append(kept + [source.randrange(3, 60) for _ in range(length - len(kept))])
    return known[1:]


@pytest.mark.parametrize("layout", MIXES, ids=lambda one: "+".join(k for k, _ in one.kinds))
def test_a_second_replica_loads_all_that_can_be_of_use(layout: Layout) -> None:
    source = random.Random(5)
    asked = [[source.randrange(3, 60) for _ in range(n)] for n in (7, 8, 33, 48, 57)]
    with place() as folder:
        with Engine(layout, folder) as first:
            ask(first, asked)
        with Engine(layout, folder) as second:
            for prompt in asked:
                expected = best_end(second, folder, prompt)
                (answer,) = ask(second, [prompt])
                assert answer.loaded == max(0, expected - answer.local)
                # Steps end in the last block that leaves a token to do, and what they leave is
                # stored. What local attention alone never reads, vLLM did not compute. vLLM 0.31
                # keeps no state before that of a prompt's very end.
                states = any(kind == "mamba" for kind, _ in layout.kinds)
                keeps = not states or vllm_version.__version_tuple__[:2] >= (0, 32)
                if layout.kinds[0][0] != "chunked_local" and keeps:
                    size = second.geometry.chunk_tokens
                    assert expected >= (len(prompt) - 1) // size * size


def test_requests_whose_loads_all_failed_do_not_wait_for_each_others_blocks() -> None:
    """To compute all of a prompt takes more blocks than the window that its load would have filled,
    and vLLM schedules none of those behind one that does not fit."""
    source = random.Random(7)
    asked = [[source.randrange(3, 60) for _ in range(58)] for _ in range(5)]
    layout = Layout((("sliding_window", 23),), (2,), num_blocks=56, step_tokens=16, retention=None)
    with place() as folder:
        with Engine(layout, folder) as one:
            ask(one, asked)
        with Engine(layout, folder) as two:
            for payload in folder.glob("chunks/*/*/*/*.safetensors"):
                payload.unlink()
            loader = two.worker.worker.loader
            ended: list[LoadOutcome] = []
            take = loader.take_finished

            def take_all(*, sync: bool) -> list[LoadOutcome]:
                """None before all of them have ended."""
                ended.extend(take(sync=sync))
                done = ended[:] if len(ended) >= len(asked) else []
                del ended[: len(done)]
                return done

            loader.take_finished = take_all
            assert [answer.local for answer in ask(two, asked)] == [0] * len(asked)


@settings(max_examples=4)
@given(layouts(), prompts(), prompts(), st.randoms(use_true_random=False))
def test_replicas_read_what_replicas_computed(
    layout: Layout, first: list[list[int]], second: list[list[int]], source: random.Random
) -> None:
    """All at once, by turns, after its own cache was dropped, and with payloads that are gone or
    spoilt: the answers are those of a model without any cache."""
    with place() as folder:
        with Engine(layout, folder) as one:
            ask(one, first)
            one.forget()
            ask(one, second)
        with Engine(layout, folder) as two:
            for prompt in second:
                expected = best_end(two, folder, prompt)
                (answer,) = ask(two, [prompt])
                assert answer.loaded == max(0, expected - answer.local)
                two.forget()
            damage(folder, source)
            ask(two, [*second, *first])
            two.forget()
            ask(two, first)
            ask(two, second)


def damage(folder: Path, source: random.Random) -> None:
    for payload in sorted(folder.glob("chunks/*/*/*/*.safetensors")):
        match source.randrange(6):
            case 0:
                payload.unlink()
            case 1:
                raw = bytearray(payload.read_bytes())
                raw[-3] ^= 1
                payload.write_bytes(raw)
