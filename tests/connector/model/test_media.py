"""What a worker reads of quantised layers, and what is refused: one scale for K and one for V."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from objkv.connector.model.media import kv_dtype_name, read_quantised
from objkv.errors import ConfigError
from objkv.transfer.paging import Quantised

PAGES = (4, 1, 32, 8)
BYTES = torch.zeros(PAGES, dtype=torch.uint8)


def layer(k: float = 0.5, v: float = 2.0, name: str = "fp8", **more: Any) -> Any:
    """What is read of vLLM's attention layer."""
    plain = {"_k_scale_float": k, "_v_scale_float": v, "kv_cache_dtype": name}
    plain |= {"_k_scale": torch.tensor(k), "_v_scale": torch.tensor(v)}
    return SimpleNamespace(**(plain | more))


def read(one: Any, cache: torch.Tensor = BYTES) -> dict[str, Quantised]:
    layers = SimpleNamespace(static_forward_context={"l0": one})
    engine: Any = SimpleNamespace(compilation_config=layers)
    return read_quantised(engine, {"l0": cache})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "F8_E4M3"),
        ("fp8_e4m3", "F8_E4M3"),
        ("fp8_e5m2", "F8_E5M2"),
        ("int8_per_token_head", None),
        ("nvfp4", None),
    ],
)
def test_plain_bytes_get_their_format_from_the_layer(name: str, dtype: str | None) -> None:
    assert read(layer(name=name)) == {"l0": Quantised(dtype, "0.5 2.0")}


def test_a_tensor_that_says_its_dtype_is_believed() -> None:
    cache = torch.zeros(PAGES, dtype=torch.float8_e5m2)
    assert read(layer(), cache) == {"l0": Quantised(None, "0.5 2.0")}


def test_wide_elements_and_states_are_not_quantised() -> None:
    assert read(layer(), BYTES.to(torch.bfloat16)) == {}
    assert read(SimpleNamespace(), BYTES.to(torch.int8)) == {}
    assert read(None) == {}


def test_a_scale_for_each_head_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype auto"):
        read(layer(_k_scale=torch.ones(2)))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_what_is_no_scale_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="not a finite positive scale"):
        read(layer(scale))


@pytest.mark.parametrize("fnuz", [False, True])
def test_the_other_kind_of_fp8_has_another_name(
    fnuz: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the value for the same bits, and 0x80 is no number but NaN."""
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: fnuz))
    suffix = "_fnuz" if fnuz else ""
    assert kv_dtype_name("fp8") == f"fp8{suffix}"
    assert kv_dtype_name("bfloat16") == "bfloat16"
    [found] = read(layer()).values()
    assert found.dtype == f"F8_E4M3{suffix[1:].upper()}"
