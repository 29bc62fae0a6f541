"""Who may share what a secondary tier stores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
)

from tests.connector.tiering import Engine, init_hashes, offload_key, row


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def make(tier: dict[str, Any] | None = None, **changes: Any) -> Engine:
        made.append(Engine(tmp_path, tier, **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def namespace(engine: Engine) -> str:
    engine.begin()
    assert engine.tier.home.namespace is not None
    return str(engine.tier.home.namespace)


def test_equal_engines_share(engines: Any) -> None:
    init_hashes()
    assert namespace(engines()) == namespace(engines(engine_id="other"))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "release-2"},
        {"tenant": "other"},
        {"weights_epoch": 1},
        {"model_id": "other"},
        {"settings": {"quantization": "fp8"}},
    ],
)
def test_what_the_operator_says_keeps_engines_apart(engines: Any, options: dict[str, Any]) -> None:
    init_hashes()
    assert namespace(engines()) != namespace(engines(options))


@pytest.mark.parametrize(
    "changes",
    [
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
    ],
)
def test_what_vllm_says_keeps_engines_apart(engines: Any, changes: dict[str, Any]) -> None:
    init_hashes()
    assert namespace(engines()) != namespace(engines(**changes))


def test_certified_bytes_are_shared_whatever_the_ranks(engines: Any) -> None:
    init_hashes()
    one = {"is_parallelism_agnostic": True}
    two = {"is_parallelism_agnostic": True, "world_size": 2, "tp_size": 2}
    assert namespace(engines(canonical_layout=True, parallel=one)) == namespace(
        engines(canonical_layout=True, parallel=two)
    )


def test_data_parallel_replicas_share(engines: Any) -> None:
    init_hashes()
    assert namespace(engines()) == namespace(
        engines(parallel={"data_parallel_size": 4, "data_parallel_index": 3})
    )


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxhash"])
def test_another_hash_algorithm_is_another_namespace(engines: Any, algorithm: str) -> None:
    init_hashes()
    one = namespace(engines())
    init_hashes(algorithm)
    assert namespace(engines()) != one


def test_another_seed_is_another_namespace(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    init_hashes()
    one = namespace(engines())
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    init_hashes()
    assert namespace(engines()) != one


def test_an_engine_made_before_it_chose_its_hash_takes_the_one_it_chose(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes its tiers first; a process may have had another engine before."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"of an engine before")
    engine = engines()
    init_hashes()
    assert namespace(engine) == namespace(engines())


def test_weights_are_read_where_they_lie(engines: Any, tmp_path: Path) -> None:
    init_hashes()
    names = set()
    for seed in (1, 2):
        folder = tmp_path / str(seed) / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(row(seed))
        model = OffloadingModelConfig(str(folder), "bfloat16")
        names.add(namespace(engines({"weights": None}, model=model)))
    assert len(names) == 2


def test_the_document_is_stored_beside_the_chunks(engines: Any, tmp_path: Path) -> None:
    init_hashes()
    engine = engines()
    engine.compute(engine.begin(), {offload_key(1): row(1)})
    engine.settle()
    engine.close = lambda: None
    name = str(engine.tier.home.namespace)
    engine.manager.shutdown()
    document = json.loads((tmp_path / "chunks" / name / "identity.json").read_bytes())
    assert document["hash"] == "vllm-block-hash-1"
    assert document["none_hash"] == kv_cache_utils.NONE_HASH.hex()


def test_replicas_with_other_weights_do_not_find_each_others_chunks(engines: Any) -> None:
    init_hashes()
    writer, reader = engines(), engines({"weights": "release-2"})
    writer.compute(writer.begin(), {offload_key(1): row(1)})
    writer.settle()
    assert reader.find(reader.begin(), [offload_key(1)]) == [LookupResult.MISS]
