"""bfloat16 and fp8 caches and every codec: what one replica writes the others read, bit for bit.

The codec belongs to a payload and not to the identity, so replicas with different settings share;
the cache's dtype does, so fp8 and bfloat16 replicas do not.
"""

from pathlib import Path
from typing import Any

from tests.engine.cache import Values, scenario
from tests.engine.fleet import NUMBERS_TOLD, SAVED, SharedStore
from tests.engine.harness import run_replica
from tests.engine.job import Call, Generate, Job, ResetPrefixCache, Step
from tests.engine.pages import LOADED_PAGES
from tests.engine.prompts import prompt_of, tokens_of

CODECS = ("blosc", "zstd", "lz4")
LENGTHS = (300, 600, 1100)
"""The prompt that the replica with each codec writes."""
LOADED = [256, 512, 1024]
PROMPTS = tuple(prompt_of(n, seed=n, max_tokens=12) for n in LENGTHS)
# One at a time: the sums of bfloat16 products depend on what else is in the batch.
ALL = tuple(Generate(prompts=(prompt,)) for prompt in PROMPTS)
LOOK = Call(
    function=LOADED_PAGES,
    arguments={
        "prompts": [
            tokens_of(length, seed=length)[: loaded + 1]
            for length, loaded in zip(LENGTHS, LOADED, strict=True)
        ]
    },
)


@scenario
def three_codecs_one_store(folder: Path) -> Values:
    store = SharedStore(folder / "store")

    def replica(*steps: Step, kv: str = "auto", **settings: Any) -> Job:
        engine = {"dtype": "bfloat16", "kv_cache_dtype": kv}
        return store.job(*steps, engine=engine, chunk_tokens=256, **settings)

    alone = replica(*ALL, LOOK).model_copy(update={"connector": None})
    runs: Values = {"alone": run_replica(alone, folder)}
    for number, codec in enumerate(CODECS):
        mode = "layerwise" if codec == "lz4" else "async"
        steps = (*ALL[: number + 1], SAVED)
        runs[codec] = run_replica(
            replica(*steps, NUMBERS_TOLD, codec=codec, load_mode=mode), folder
        )
    steps = (*ALL, LOOK, ResetPrefixCache(), *ALL)
    runs["reader"] = run_replica(replica(*steps), folder)
    steps = (*ALL[:2], SAVED, LOOK)
    runs["fp8"] = run_replica(replica(*steps, kv="fp8"), folder)
    fp8_again = replica(*steps, kv="fp8", codec="blosc", load_mode="layerwise")
    runs["fp8 again"] = run_replica(fp8_again, folder)
    runs["namespaces"] = len(store.namespaces())
    return runs


def test_each_replica_loads_what_the_others_wrote_with_another_codec() -> None:
    runs = three_codecs_one_store()
    for number, codec in enumerate(CODECS):
        assert runs[codec].cached[: number + 1] == [*LOADED[:number], 0], codec
    assert runs["reader"].cached == LOADED * 2


def test_the_tokens_are_those_of_vllm_alone() -> None:
    runs = three_codecs_one_store()
    alone = runs["alone"].tokens
    assert runs["reader"].tokens == alone * 2
    for number, codec in enumerate(CODECS):
        assert runs[codec].tokens[: number + 1] == alone[: number + 1], codec


def test_every_loaded_page_is_what_vllm_alone_computes() -> None:
    runs = three_codecs_one_store()
    assert runs["reader"].answers[0] == runs["alone"].answers[0]
    assert all(all(digests) for page in runs["alone"].answers[0] for digests in page.values())


def test_payloads_of_the_shuffling_codecs_are_smaller() -> None:
    runs = three_codecs_one_store()
    raw = 2 * 3 * 4 * 64 * 2  # K and V, layers, heads, content, bytes of bfloat16, per token
    for codec, tokens in (("blosc", 256), ("zstd", 512)):
        assert runs[codec].metrics["vllm:objkv_save_bytes"] < 0.98 * raw * tokens, codec


def test_an_fp8_cache_is_shared_with_fp8_caches_only() -> None:
    runs = three_codecs_one_store()
    assert runs["namespaces"] == 2
    assert runs["fp8"].cached == [0, 0]
    assert runs["fp8 again"].cached == LOADED[:2]
    assert runs["fp8 again"].tokens == runs["fp8"].tokens
    assert runs["fp8 again"].answers[-1] == runs["fp8"].answers[-1]
