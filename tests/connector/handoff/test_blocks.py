"""Blocks copied by id between caches of any layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.connector.handoff import blocks as block_copy
from objkv.connector.handoff.blocks import copy_blocks
from objkv.errors import TransferError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float64,
]


def blocks(count: int, inner: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.empty((), dtype=dtype).element_size()
    shape = (count, *inner[:-1], inner[-1] * nbytes)
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def laid_out(values: torch.Tensor, order: list[int], padding: int) -> torch.Tensor:
    """The same values in another physical order of dimensions, and with gaps between blocks."""
    shape = [values.shape[i] for i in order]
    shape[0] += padding
    home = torch.zeros(shape, dtype=torch.uint8 if values.element_size() == 1 else values.dtype)
    home = home.view(values.dtype)[: values.shape[order[0]]]
    inverse = [order.index(i) for i in range(len(order))]
    tensor = home.permute(inverse)
    tensor.view(block_copy.WORDS[values.element_size()]).copy_(
        values.view(block_copy.WORDS[values.element_size()])
    )
    return tensor


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(block_copy.WORDS[tensor.element_size()])


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_exactly_the_named_blocks_are_copied_bit_for_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    inner = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    src_count, dst_count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    dst_ids = data.draw(st.lists(st.integers(0, dst_count - 1), unique=True))
    one = st.integers(0, src_count - 1)
    src_ids = data.draw(st.lists(one, min_size=len(dst_ids), max_size=len(dst_ids)))
    orders = st.permutations(range(len(inner) + 1))
    padding = st.integers(0, 3)
    src, dst = {}, {}
    for layer in range(data.draw(st.integers(1, 3))):
        values = blocks(src_count, inner, dtype, seed=layer)
        src[f"l{layer}"] = laid_out(values, data.draw(orders), data.draw(padding))
        values = blocks(dst_count, inner, dtype, seed=100 + layer)
        dst[f"l{layer}"] = laid_out(values, data.draw(orders), data.draw(padding))
    before = {name: tensor.clone() for name, tensor in dst.items()}
    sources = {name: tensor.clone() for name, tensor in src.items()}

    copy_blocks(src, dst, src_ids, dst_ids, data.draw(st.sampled_from(["h2d", "d2h"])))

    came_from = dict(zip(dst_ids, src_ids, strict=True))
    for name, tensor in dst.items():
        assert torch.equal(raw(src[name]), raw(sources[name]))
        for block in range(dst_count):
            expected = (
                sources[name][came_from[block]] if block in came_from else before[name][block]
            )
            assert torch.equal(raw(tensor[block]), raw(expected))


def test_blocks_of_one_cache_can_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_STAGED_BYTES_MAX", 1)
    cache = blocks(6, (2, 3), torch.bfloat16)
    before = cache.clone()
    copy_blocks({"l": cache}, {"l": cache}, [0, 1, 5], [1, 0, 2], "d2h")
    assert torch.equal(raw(cache), raw(before[[1, 0, 5, 3, 4, 5]]))


def test_what_is_on_its_way_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "_STAGED_BYTES_MAX", 3 * 2 * 4 * 2)
    src, dst = blocks(9, (2, 4), torch.float16), blocks(9, (2, 4), torch.float16, seed=1)
    sizes = []
    select = torch.Tensor.index_select

    def watched(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        sizes.append(len(index))
        return select(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", watched)
    copy_blocks({"l": src}, {"l": dst}, list(range(8)), list(range(8)), "h2d")
    assert sizes == [3, 3, 2]
    assert torch.equal(raw(dst[:8]), raw(src[:8]))


def test_no_blocks_are_no_work() -> None:
    cache = blocks(2, (3,), torch.float32)
    copy_blocks({"l": cache}, {"l": cache.clone()}, [], [], "h2d")
    copy_blocks({}, {}, [], [], "d2h")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a | {"src_ids": [0]}, "1 source blocks, but 2 target"),
        (lambda a: a | {"dst_ids": [1, 1]}, "written twice"),
        (lambda a: a | {"src_ids": [0, 4]}, "blocks 0 to 3"),
        (lambda a: a | {"src_ids": [0, -1]}, "blocks 0 to 3"),
        (lambda a: a | {"dst_ids": [0, 5]}, "blocks 0 to 4"),
        (lambda a: a | {"dst": {"m": a["dst"]["l"]}}, "layers only in source"),
        (
            lambda a: a | {"dst": {**a["dst"], "m": a["dst"]["l"]}},
            "layers only in source",
        ),
        (lambda a: a | {"dst": {"l": torch.zeros(5, 3, 2)}}, "differ in shape"),
        (lambda a: a | {"dst": {"l": torch.zeros(5, 2, 3, dtype=torch.int32)}}, "cannot copy"),
        (lambda a: a | {"dst": {"l": torch.zeros(5, 2, 1).expand(5, 2, 3)}}, "share memory"),
        (lambda a: a | {"direction": "sideways"}, "unknown direction"),
        (lambda a: a | {"src": {"l": torch.zeros(4, 2, 3, device="meta")}}, "not on the host"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    change: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    dst = torch.zeros(5, 2, 3)
    arguments = {
        "src": {"l": torch.ones(4, 2, 3)},
        "dst": {"l": dst},
        "src_ids": [0, 1],
        "dst_ids": [1, 2],
        "direction": "h2d",
    }
    with pytest.raises(TransferError, match=says):
        copy_blocks(**change(arguments))
    assert not dst.any()


def test_a_layer_that_does_not_fit_keeps_the_others_as_they_were() -> None:
    src = {"a": torch.ones(4, 2), "b": torch.ones(2, 2)}
    dst = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}
    with pytest.raises(TransferError):
        copy_blocks(src, dst, [3], [0], "d2h")
    assert not dst["a"].any()


def test_two_devices_on_one_side_are_refused() -> None:
    src = {"a": torch.ones(4, 2), "b": torch.ones(4, 2, device="meta")}
    dst = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}
    with pytest.raises(TransferError, match="several devices"):
        copy_blocks(src, dst, [0], [0], "d2h")
