"""Who may share what a secondary tier stores."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)

from objkv.errors import ConfigError
from tests.connector.tier.world import Engine, init_hashes

UNREADABLE = SimpleNamespace(model="some/draft", revision=None, seed=0)
DRAFT = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "draft_model_config": SimpleNamespace(model="some/draft", revision="v1", seed=0),
}


def namespace(engine: Engine) -> str:
    engine.begin()
    assert engine.tier.namespace.current is not None
    return str(engine.tier.namespace.current)


@pytest.mark.parametrize(
    "changes",
    [
        {"tier": {"tenant": "other"}},
        {"tier": {"weights_epoch": 1}},
        {"tier": {"model_id": "other"}},
        {"tier": {"settings": {"quantization": "fp8"}}},
        {"model": OffloadingModelConfig("other/model", "bfloat16")},
        {"model": OffloadingModelConfig("some/model", "fp8_e5m2")},
        {"groups": (OffloadingGroupConfig(16, ("l0", "l2"), 0),)},
        {"groups": (OffloadingGroupConfig(32, ("l0", "l1"), 0),)},
        {"groups": (OffloadingGroupConfig(16, ("l0", "l1"), 1),)},
        {"cache": OffloadingCacheConfig(tokens_per_hash=8, blocks_per_chunk=1)},
        {"kv_cache_layout": "LBHNC"},
        {"canonical_layout": True},
        {"parallel": {"world_size": 2, "tp_size": 2}},
        {"parallel": {"world_size": 2, "tp_size": 2, "is_parallelism_agnostic": True}},
        {"parallel": {"world_size": 2, "pp_size": 2}},
        {"engine": {"model_config": {"quantization": "fp8"}}},
        {"engine": {"model_config": {"hf_overrides": {"rope_theta": 500_000}}}},
        {"engine": {"model_config": {"dtype": "torch.float16"}}},
        {"engine": {"model_config": {"revision": "v2"}}},
        {"engine": {"load_config": {"load_format": "dummy"}}},
        {"engine": {"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}}},
    ],
)
def test_what_the_operator_or_vllm_says_keeps_engines_apart(
    engines: Any, changes: dict[str, Any]
) -> None:
    assert namespace(engines()) != namespace(engines(**changes))


@pytest.mark.parametrize(
    ("engine", "word"),
    [
        ({"lora_config": {"lora_dtype": "auto"}}, "'adapters'"),
        ({"model_config": {"revision": None}}, "weights"),
        ({"speculative_config": DRAFT | {"draft_model_config": UNREADABLE}}, "the draft"),
        (
            {
                "model_config": {
                    "multimodal_config": SimpleNamespace(
                        mm_processor_cache_gb=0, mm_processor_kwargs=None
                    )
                },
                "cache_config": {"enable_prefix_caching": False},
            },
            "mm-processor-cache-gb",
        ),
        (
            {"parallel_config": {"distributed_executor_backend": "external_launcher"}},
            "external_launcher",
        ),
    ],
)
def test_what_keys_do_not_tell_is_refused(engines: Any, engine: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        engines(engine=engine, parallel={"world_size": 2, "tp_size": 2})


def test_a_draft_is_named_by_method_tokens_and_weights(engines: Any) -> None:
    others = (
        {"method": "eagle"},
        {"num_speculative_tokens": 4},
        {"draft_model_config": SimpleNamespace(model="d", revision="v2", seed=0)},
    )
    drafts = [DRAFT, *(DRAFT | one for one in others)]
    names = [namespace(engines(engine={"speculative_config": draft})) for draft in drafts]
    assert len({*names, namespace(engines())}) == 5
    for method in ("ngram", "medusa"):
        engine = {"speculative_config": {"method": method}}
        assert namespace(engines(engine=engine)) == namespace(engines())


def test_what_the_operator_names_is_not_refused(engines: Any) -> None:
    draft = DRAFT | {"draft_model_config": UNREADABLE}
    engine = {"lora_config": {"lora_dtype": "auto"}, "speculative_config": draft}
    settings = {"adapters": "release-1", "speculative": "draft-1"}
    first = namespace(engines({"settings": settings}, engine=engine))
    assert namespace(engines({"settings": settings | {"adapters": "2"}}, engine=engine)) != first
    alone = {"parallel_config": {"distributed_executor_backend": "external_launcher"}}
    assert engines(engine=alone).tier.namespace.open


def test_certified_bytes_are_shared_whatever_the_ranks(engines: Any) -> None:
    one = {"is_parallelism_agnostic": True}
    two = {"is_parallelism_agnostic": True, "world_size": 2, "tp_size": 2}
    assert namespace(engines(canonical_layout=True, parallel=one)) == namespace(
        engines(canonical_layout=True, parallel=two)
    )


def test_another_hash_or_seed_is_another_namespace(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    names = set()
    for algorithm, seed in (("sha256", ""), ("sha256_cbor", ""), ("xxhash", ""), ("sha256", "1")):
        if seed:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        init_hashes(algorithm)
        names.add(namespace(engines()))
    assert len(names) == 4


def test_an_engine_made_before_it_chose_its_hash_takes_the_one_it_chose(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes its tiers first; a process may have had another engine before."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"of an engine before")
    engine = engines()
    init_hashes()
    assert namespace(engine) == namespace(engines())
