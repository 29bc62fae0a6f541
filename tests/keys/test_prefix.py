"""The prefix hash as a chain, and that no two distinct inputs encode alike."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objkv.keys.prefix import (
    Extra,
    MultimodalItem,
    PrefixChain,
    PromptExtras,
    encode_extras,
    encode_tokens,
    next_hash,
    prefix_hashes,
    root_hash,
)

NAMESPACE = "0123456789abcdef" * 2

token = st.integers(0, 2**32 - 1)
# Few and short values, so that hypothesis finds collisions where there are any.
short = st.binary(max_size=3)
extra = st.builds(
    Extra, st.sampled_from(["lora", "salt", "mm", "embeds"]), st.lists(short, max_size=3).map(tuple)
)
extra_list = st.lists(extra, max_size=3)
item = st.builds(MultimodalItem, short, st.integers(0, 20), st.integers(1, 9))
extras_of_a_prompt = st.builds(
    PromptExtras,
    lora_digest=st.none() | short,
    salt=st.none() | st.text(max_size=2),
    items=st.lists(item, max_size=3).map(tuple),
    embeds=st.dictionaries(st.integers(0, 4), short, max_size=2),
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([Extra("mm", (b"ab", b"c"))], [Extra("mm", (b"a", b"bc"))]),
        ([Extra("mm", (b"a",)), Extra("mm", (b"b",))], [Extra("mm", (b"a", b"b"))]),
        ([Extra("lora", (b"x",))], [Extra("salt", (b"x",))]),
        ([Extra("salt", (b"",))], [Extra("salt", ())]),
        ([Extra("salt", ())], []),
    ],
)
def test_moving_a_border_between_fields_changes_the_encoding(
    one: list[Extra], other: list[Extra]
) -> None:
    assert encode_extras(one) != encode_extras(other)


@given(st.lists(token, max_size=6), st.lists(token, max_size=6), extra_list, extra_list)
def test_different_chunks_of_one_parent_have_different_hashes(
    one: list[int], other: list[int], one_extras: list[Extra], other_extras: list[Extra]
) -> None:
    parent = root_hash(NAMESPACE)
    hashes = [
        next_hash(parent, encode_tokens(tokens), extras)
        for tokens, extras in ((one, one_extras), (other, other_extras))
    ]
    assert (hashes[0] == hashes[1]) == ((one, one_extras) == (other, other_extras))


@given(st.lists(token, min_size=1, max_size=24), st.integers(1, 24), st.integers(1, 24))
def test_another_split_into_chunks_gives_other_hashes(
    tokens: list[int], size: int, other: int
) -> None:
    shared = set(prefix_hashes(NAMESPACE, tokens, size)) & set(
        prefix_hashes(NAMESPACE, tokens, other)
    )
    # The first chunk of all tokens is one chunk in both only if the sizes are equal.
    assert not shared or size == other


def test_another_namespace_gives_other_hashes() -> None:
    here = prefix_hashes(NAMESPACE, range(32), 8)
    there = prefix_hashes(NAMESPACE[::-1], range(32), 8)
    assert not set(here) & set(there)


@given(st.lists(token, min_size=4, max_size=32), extras_of_a_prompt, st.data())
def test_a_change_in_chunk_i_changes_every_hash_from_i_on_and_none_before(
    tokens: list[int], extras: PromptExtras, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 4))
    at = data.draw(st.integers(0, len(tokens) // size * size - 1))
    changed = list(tokens)
    changed[at] = data.draw(token.filter(lambda value: value != tokens[at]))
    before = prefix_hashes(NAMESPACE, tokens, size, extras)
    after = prefix_hashes(NAMESPACE, changed, size, extras)
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [chunk < at // size for chunk in range(len(before))]


@given(extras_of_a_prompt, extras_of_a_prompt, st.integers(1, 8))
def test_extras_that_differ_in_a_chunk_change_its_hash_and_all_later_ones(
    one: PromptExtras, other: PromptExtras, size: int
) -> None:
    tokens = range(24)
    chunks = range(24 // size)
    first = next((i for i in chunks if one.of_chunk(i, size) != other.of_chunk(i, size)), 24)
    hashes = [prefix_hashes(NAMESPACE, tokens, size, extras) for extras in (one, other)]
    assert [a == b for a, b in zip(*hashes, strict=True)] == [i < first for i in chunks]


@given(st.lists(token, max_size=40), st.integers(1, 7), extras_of_a_prompt, st.data())
def test_a_chain_that_grows_in_steps_equals_one_computed_at_once(
    tokens: list[int], size: int, extras: PromptExtras, data: st.DataObject
) -> None:
    chain = PrefixChain(NAMESPACE, size, extras)
    steps = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    for known in [*steps, len(tokens)]:
        assert (
            chain.extend(tokens, known)
            == prefix_hashes(NAMESPACE, tokens, size, extras)[: known // size]
        )


def test_an_item_is_in_every_chunk_that_it_overlaps_and_in_no_other() -> None:
    extras = PromptExtras(items=(MultimodalItem(b"image", 6, 4),))
    held = [extras.of_chunk(chunk, 4) for chunk in range(4)]
    at = [(2).to_bytes(8, "little"), (-2).to_bytes(8, "little", signed=True)]
    length = (4).to_bytes(8, "little")
    assert held == [
        (),
        (Extra("mm", (b"image", at[0], length)),),
        (Extra("mm", (b"image", at[1], length)),),
        (),
    ]


ITEMS = [MultimodalItem(*one) for one in ((b"a", 0, 2), (b"a", 0, 3), (b"b", 0, 2), (b"b", 5, 2))]


@given(st.permutations(ITEMS))
def test_the_order_in_which_items_are_given_does_not_matter(items: list[MultimodalItem]) -> None:
    for chunk, count in ((0, 3), (1, 1)):
        found = PromptExtras(items=tuple(items)).of_chunk(chunk, 4)
        assert found == PromptExtras(items=tuple(ITEMS)).of_chunk(chunk, 4)
        assert len(found) == count


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_a_salt(salt: str) -> None:
    (held,) = PromptExtras(salt=salt).of_chunk(0, 4)
    assert held.fields[0].decode("utf-8", "surrogatepass") == salt


@pytest.mark.parametrize("tokens", [[-1], [2**32]])
def test_a_token_that_is_no_unsigned_32_bit_number_is_refused(tokens: Sequence[int]) -> None:
    with pytest.raises(OverflowError):
        encode_tokens(tokens)


def test_the_chunks_of_some_hashes_are_found_in_order() -> None:
    chain = PrefixChain("0" * 32, 4, PromptExtras())
    hashes = list(chain.extend(list(range(20)), 20))
    assert chain.find({hashes[3], hashes[1], b"?" * 20}) == [1, 3]
    assert chain.find({b"?" * 20}) == []


CASES = json.loads((Path(__file__).parents[1] / "vectors" / "prefix_hashes.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_objkv_gives_the_published_hashes(case: dict[str, Any]) -> None:
    lora = case["lora_digest"]
    prompt_extras = PromptExtras(
        lora_digest=None if lora is None else bytes.fromhex(lora),
        salt=case["salt"],
        items=tuple(MultimodalItem(bytes.fromhex(i), start, n) for i, start, n in case["items"]),
        embeds={int(chunk): bytes.fromhex(digest) for chunk, digest in case["embeds"].items()},
    )
    hashes = prefix_hashes(case["namespace"], case["tokens"], case["chunk_tokens"], prompt_extras)
    assert root_hash(case["namespace"]).hex() == case["root"]
    assert [digest.hex() for digest in hashes] == case["hashes"]
