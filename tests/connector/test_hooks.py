"""What objkv patches in vLLM, and what it does to blocks of failed loads."""

import importlib.util
import inspect
import logging
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_worker import Worker
from vllm.version import __version__ as vllm_version

from objkv.connector import ObjKVConnector, ObjKVECConnector
from objkv.connector import hooks as module
from objkv.connector.hooks import (
    EngineHooks,
    evict_failed,
    follow_encoder_resets,
    follow_sleep,
    may_change_weights,
)
from scripts.checks.private import unlisted

pytestmark = pytest.mark.usefixtures("vllm_as_before")


class Executor:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def collective_rpc(self, method: Any, *_: Any) -> list[str]:
        self.calls.append(method)
        if self.error is not None:
            raise self.error
        return ["done"]

    def add_lora(self, adapter: Any) -> bool:
        self.calls.append(adapter)
        return True

    remove_lora = add_lora


class Side:
    """The scheduler's side, as far as hooks know it."""

    def __init__(self) -> None:
        self.open = True
        self.resets: list[bool] = []
        self.heard: list[Any] = []
        self.adapters = SimpleNamespace(loaded=self.heard.append, unloaded=self.heard.append)

    def reset(self, *, clean: bool) -> bool:
        self.resets.append(clean)
        self.open = clean
        return clean


def manager(*, usage: float = 0.0, blocks: int = 0) -> Any:
    pool = SimpleNamespace(cached_block_hash_to_block=dict.fromkeys(range(blocks)))
    return SimpleNamespace(usage=usage, block_pool=pool)


@pytest.fixture
def engine() -> Any:
    core: Any = object.__new__(EngineCore)
    core.model_executor = Executor()
    return core


def hooks_of(side: Side, kept: Any) -> EngineHooks:
    return EngineHooks(cast("Any", side), lambda: kept)


def hooked() -> Side:
    """A side whose hooks live as long as it does, of an engine that holds no blocks."""
    side: Any = Side()
    side.hooks = hooks_of(side, manager())
    return cast("Side", side)


def look(worker: Any) -> None:
    """What anybody may have the workers do."""
    raise AssertionError(worker)


def look_only(worker: Any) -> None:
    """The same, and whoever wrote it says that it leaves weights alone."""
    raise AssertionError(worker)


look_only.objkv_keeps_weights = True  # type: ignore[attr-defined]


def compute_weight_checksums(worker: Any) -> None:
    """A function's name says nothing, not even a name of vLLM's."""
    raise AssertionError(worker)


FUNCTIONS = [look, compute_weight_checksums, partial(look_only), pickle.dumps(look_only), b"", None]
"""Of which nobody can say what they do. vLLM takes pickled ones too."""
NAMES = ["update_weights", "update_named_param", "apply_model", "load_model", "refit"]


@pytest.mark.parametrize("method", [*NAMES, *FUNCTIONS])
def test_what_may_change_weights_leaves_the_namespace(engine: Any, method: Any) -> None:
    side = hooked()
    assert engine.collective_rpc(method, None, (), {"weights_path": "x"}) == ["done"]
    assert engine.model_executor.calls == [method]
    assert side.resets == [True]


@pytest.mark.parametrize("function", [look_only, cloudpickle.loads(cloudpickle.dumps(look_only))])
def test_unless_it_says_that_it_keeps_them(engine: Any, function: Any) -> None:
    side = hooked()
    engine.collective_rpc(method=function)
    engine.collective_rpc(function, args=(look,))
    engine.collective_rpc("apply_model", args=(function,))
    engine.collective_rpc("apply_model", 1.0, [function], {})  # as it comes from a client
    assert side.resets == []


ARGUMENTS = [*((one,) for one in FUNCTIONS), (), (look_only, look_only), ("get_model",), None, 5]


@pytest.mark.parametrize("args", ARGUMENTS)
def test_only_the_call_that_vllm_makes_of_it_is_known(args: Any) -> None:
    assert may_change_weights("apply_model", args)
    assert may_change_weights("update_weights", (look_only,))
    for method in ("compute_weight_checksums", "init_weight_transfer_engine", "sleep", "get_model"):
        assert not may_change_weights(method)


def test_an_update_that_failed_half_way_is_one(engine: Any) -> None:
    side = hooked()
    engine.model_executor.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.collective_rpc("update_weights")
    assert side.resets == [True]


def test_what_goes_wrong_in_objkv_does_not_reach_the_engine(engine: Any) -> None:
    side = hooked()
    side.reset = lambda *, clean: 1 / 0  # type: ignore[method-assign,return-value]
    assert engine.collective_rpc("update_weights") == ["done"]


@pytest.mark.parametrize("kept", [manager(blocks=1), manager(usage=0.1), None])
def test_while_vllm_keeps_blocks_of_the_old_weights_nothing_is_shared(
    engine: Any, kept: Any
) -> None:
    side = Side()
    _hooks = hooks_of(side, kept)
    engine.collective_rpc("update_weights")
    module.reopen(cast("Any", side), kept)
    assert side.resets == [False]
    assert not side.open


def test_sharing_with_itself_begins_again_once_vllm_has_dropped_them(engine: Any) -> None:
    """By ``reset_prefix_cache`` without ``reset_connector``, of which a connector hears nothing."""
    side, kept = Side(), manager(blocks=3)
    _hooks = hooks_of(side, kept)
    engine.collective_rpc("update_weights")
    kept.block_pool.cached_block_hash_to_block.clear()
    module.reopen(cast("Any", side), kept)
    module.reopen(cast("Any", side), kept)
    assert side.resets == [False, True]


def test_connectors_that_are_gone_hear_nothing_and_each_class_is_wrapped_once(engine: Any) -> None:
    sides = [Side() for _ in range(3)]
    kept = [hooks_of(side, manager()) for side in sides]
    kept.pop()
    engine.collective_rpc("update_weights")
    assert [side.resets for side in sides] == [[True], [True], []]
    assert inspect.signature(EngineCore.collective_rpc).parameters.keys() >= {"method", "timeout"}


def test_an_adapter_is_put_away_before_it_is_forgotten(engine: Any) -> None:
    """Until then vLLM computes with what was read of it."""
    side, order = hooked(), engine.model_executor.calls
    side.adapters = SimpleNamespace(
        loaded=lambda request: order.append("read"),
        unloaded=lambda number: order.append("forgotten"),
    )
    engine.add_lora("adapter")
    engine.remove_lora(4)
    assert order == ["read", "adapter", 4, "forgotten"]


def test_a_version_of_vllm_that_works_otherwise_is_told_to_the_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(EngineCore, "collective_rpc")
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        hooks_of(Side(), manager())
    assert "reset_prefix_cache(reset_connector=True)" in caplog.text


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM worker whose memory is nobody's; each call is heard in order."""

    def heard(name: str) -> Callable[..., None]:
        return lambda self, *_args, **_more: self.heard.append(name)

    for name in ("sleep", "wake_up", "discard"):
        monkeypatch.setattr(Worker, name, heard(name))
    monkeypatch.setattr(Worker, "unregister_kv_caches", heard("unregister"), raising=False)
    monkeypatch.setattr(Worker, "restore_kv_caches", heard("restore"), raising=False)
    worker: Any = object.__new__(Worker)
    worker.heard = []
    return worker


def test_the_paged_cache_is_let_go_before_its_memory_and_taken_after_it_is_back(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    follow_sleep(worker)
    follow_sleep(worker)
    worker.sleep(2)
    worker.wake_up(["weights"])
    worker.wake_up(tags=["kv_cache"])
    worker.discard(("weights",))
    worker.discard(("kv_cache",))
    worker.wake_up()
    assert worker.heard == [
        *("unregister", "sleep", "wake_up", "wake_up", "restore"),
        *("discard", "unregister", "discard", "wake_up", "restore"),
    ]


def test_where_vllm_tells_connectors_itself_its_worker_is_left_alone(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False
    )
    follow_sleep(worker)
    worker.sleep(1)
    assert worker.heard == ["sleep"]


def test_the_first_failed_block_and_all_after_it_are_forgotten_in_every_request() -> None:
    """Also in one that was aborted in that step, whose blocks the prefix cache still knows."""
    tables = {"b": [1, 2, 9], "c": [7, 8], "waiting": []}
    evicted = set[int]()
    manager: Any = SimpleNamespace(
        get_block_ids=lambda name: (tables.get(name, []),), evict_blocks=evicted.update
    )
    evict_failed(manager, ["b", "c", "waiting", "unknown"], [[1, 2, 3, 4], [5, 6]], {2})
    assert evicted == {2, 3, 4, 9}


# What is private in vLLM, and which version broke it.

_KV, _EC = "distributed.kv_transfer.kv_connector.", "distributed.ec_transfer.ec_connector."
_METRICS, _LAYERS = "_counter_cls _gauge_cls _histogram_cls", "model_executor.layers."
PRIVATE = {
    f"{_KV}factory": "_registry",
    f"{_EC}factory": "_registry",
    f"{_KV}v1.base": "_kv_transfer_config _vllm_config _kv_cache_manager _get_connector_metadata",
    f"{_EC}base": "_get_connector_metadata",
    f"{_KV}v1.metrics": _METRICS,
    f"{_EC}metrics": _METRICS,
    "v1.attention.backends.cpu_attn": "_get_attn_isa",
    f"{_LAYERS}quantization.kv_cache": "_k_scale _v_scale _k_scale_float _v_scale_float",
    "v1.core.kv_cache_utils": "NONE_HASH maybe_convert_block_hash generate_block_hash_extra_keys",
    "v1.core.block_pool": "cached_block_hash_to_block",
    "v1.core.kv_cache_manager": "evict_blocks",
}
"""Private and internal names that objkv uses, by the modules in ``vllm`` that define them."""


@pytest.mark.parametrize("method", module.PATCHED)
def test_what_is_patched_exists_in_this_vllm(method: str) -> None:
    where, owner = module.PATCHED[method]
    found = getattr(importlib.import_module(where), owner).__dict__
    assert method in found, f"vLLM {vllm_version} has no {owner}.{method}"


@pytest.mark.parametrize("where", PRIVATE)
def test_private_names_exist_in_this_vllm(where: str) -> None:
    spec = importlib.util.find_spec(f"vllm.{where}")
    assert spec is not None, f"vLLM {vllm_version} has no {where}"
    assert spec.origin is not None
    words = set(re.findall(r"\w+", Path(spec.origin).read_text()))
    assert set(PRIVATE[where].split()) <= words, vllm_version


def test_no_private_name_of_another_object_is_used_that_is_not_in_the_table() -> None:
    assert unlisted("connector") - {"_getframe"} <= set(" ".join(PRIVATE.values()).split())


def test_the_switch_leaves_vllm_as_it_is(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    before = [dict(owner.__dict__) for owner in (EngineCore, Worker)]
    EngineHooks(cast("Any", Side()), lambda: None, patches=False)
    follow_sleep(worker, patches=False)
    follow_encoder_resets(cast("Any", Side()), patches=False)
    assert [dict(owner.__dict__) for owner in (EngineCore, Worker)] == before
    assert "reset_prefix_cache(reset_connector=True)" in caplog.text


# A method that a new vLLM adds to its connectors is noticed: objkv has it, or leaves it.

LEFT = """bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager clear_connector_metadata
finish_forward get_external_cache_hit_sources get_finished get_finished_count get_handshake_metadata
get_kv_connector_kv_cache_events get_loaded_kv_cache_group_ids get_mem_pool_context
get_required_kvcache_layout has_connector_metadata has_pending_push_work is_consumer is_producer
register_caches register_finished_partial_tail reset_capture_state role set_host_xfer_buffer_ops
set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware start_save_caches
start_worker_services supports_divergent_local_hybrid_hits take_unavailable_requests
update_state_after_free"""


def test_every_public_method_of_vllms_connectors_is_known() -> None:
    for base, own in (KVConnectorBase_V1, ObjKVConnector), (ECConnectorBase, ObjKVECConnector):
        ours = {name for one in own.__mro__ if "objkv" in one.__module__ for name in vars(one)}
        assert {name for name in dir(base) if name[0] != "_"} - ours <= set(LEFT.split())
