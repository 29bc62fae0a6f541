"""A secondary tier finds the configuration of the engine that vLLM makes it for."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from objkv.connector.tier.manager import ObjKVTier
from tests.connector.kv.hybrid_layout import plain_config
from tests.support.agents import agent_folder


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes vLLM's connector of a scheduler, as the scheduler does."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(plain_config().model_config.model) / "config.json", folder)
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}" + b"x" * 100)
    made: list[Any] = []

    def make(transfer: dict[str, Any], **engine: Any) -> Any:
        args = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=256,
            block_size=32,
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
            **engine,
        )
        made.append(_scheduler_connector(args.create_engine_config()))
        return made[-1]

    with agent_folder() as sockets:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
        yield make
        for connector in made:
            connector.shutdown()


def _scheduler_connector(config: VllmConfig) -> Any:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    cache = KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)


def offloading(folder: Path, **tier: Any) -> dict[str, Any]:
    entry = {
        "type": "ObjKVTier",
        "module_path": "objkv.connector.tier",
        "bulk_url": f"file://{folder}/chunks",
        "index_url": f"sqlite://{folder}/index.sqlite",
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [entry | tier],
        },
    }


def bound(usage: float) -> Any:
    """vLLM's KVCacheManager."""
    return SimpleNamespace(usage=usage, block_pool=SimpleNamespace())


def tier_of(connector: Any) -> ObjKVTier:
    (tier,) = connector.connector_scheduler.manager.secondary_tiers
    assert isinstance(tier, ObjKVTier)
    return tier


def test_overrides_and_quantization_given_to_vllm_are_part_of_the_identity(
    connect: Callable[..., Any], tmp_path: Path
) -> None:
    plain = tier_of(connect(offloading(tmp_path))).namespace.identity
    theirs = connect(offloading(tmp_path), hf_overrides={"rope_theta": 77_000.0})
    told = tier_of(theirs).namespace.identity
    assert plain.weights.startswith("sampled:")
    assert dict(plain.engine) == {"dtype": "bfloat16", "quantization": "None"}
    assert dict(told.engine)["hf_overrides"] == '{"rope_theta": 77000.0}'
    assert told.namespace() != plain.namespace()


def test_a_reset_opens_the_tier_only_when_no_block_of_the_device_is_held(
    connect: Callable[..., Any], tmp_path: Path
) -> None:
    connector = connect(offloading(tmp_path))
    tier = tier_of(connector)
    for usage, is_open in ((0.5, False), (0.0, True)):
        connector.bind_kv_cache_manager(bound(usage))
        connector.reset_cache()
        assert tier.open == is_open
