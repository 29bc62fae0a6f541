"""Tenants and salts: if one differs, all names differ, so there are no hits.

``tests/engine/test_zoo.py`` shows the effect with engines, and
``tests/services/test_access_*`` the refusals of servers.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.config import Config
from objkv.index.memory import MemoryIndex
from objkv.keys.encoder import encoder_hash
from objkv.keys.identity import Identity
from objkv.keys.prefix import PrefixChain, PromptExtras, prefix_hashes, root_hash
from objkv.stores.memory import MemoryStore
from tests.support.samples import CHUNK, IDENTITY, TOKENS, save, save_identity

TENANTS = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
SALTS = st.none() | st.text(max_size=8)
TOKEN_LISTS = st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=40)


def of_tenant(tenant: str) -> Identity:
    assert Config(tenant=tenant).tenant == tenant
    return replace(IDENTITY, tenant=tenant)


@settings(max_examples=30)
@given(TENANTS, TENANTS, TOKEN_LISTS, SALTS)
def test_tenants_have_no_name_in_common(
    one: str, other: str, tokens: list[int], salt: str | None
) -> None:
    names = [of_tenant(tenant).namespace() for tenant in (one, other)]
    assert (names[0] == names[1]) == (one == other)
    hashes = [set(prefix_hashes(name, tokens, 4, PromptExtras(salt=salt))) for name in names]
    roots = {root_hash(name) for name in names}
    assert hashes[0].isdisjoint(hashes[1]) == (one != other)
    assert len(roots) == len(set(names))


@settings(max_examples=30)
@given(SALTS, SALTS, TOKEN_LISTS, TOKEN_LISTS)
def test_salts_have_no_chunk_in_common_however_long_the_prompt(
    one: str | None, other: str | None, tokens: list[int], more: list[int]
) -> None:
    """Chunk 0 holds the salt, and each chunk's name that of the one before it."""
    chains = [PrefixChain("ab" * 16, 4, PromptExtras(salt=salt)) for salt in (one, other)]
    hashes = []
    for chain in chains:
        found = list(chain.extend(tokens, len(tokens)))
        whole = [*tokens, *more]
        found += chain.extend(whole, len(whole))
        hashes.append(set(found))
    assert hashes[0].isdisjoint(hashes[1]) == (one != other)


@settings(max_examples=30)
@given(TENANTS, TENANTS, SALTS, SALTS, st.text(max_size=8))
def test_outputs_of_encoders_are_apart_as_well(
    one: str, other: str, salt: str | None, pepper: str | None, item: str
) -> None:
    mine = encoder_hash(of_tenant(one).namespace(), item, salt=salt)
    theirs = encoder_hash(of_tenant(other).namespace(), item, salt=pepper)
    assert (mine == theirs) == ((one, salt) == (other, pepper))


@pytest.mark.parametrize("tenant", ["a", "Default", "default.", "defaul"])
def test_in_stores_that_tenants_share_none_finds_what_another_saved(tenant: str) -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    keys = save(bulk, index, TOKENS)  # of the tenant "default"
    fields = [keys[0].field]
    namespace = of_tenant(tenant).namespace()
    for hashes in (
        prefix_hashes(namespace, TOKENS, CHUNK),
        [key.prefix_hash for key in keys],  # nor by the names that the other uses
    ):
        assert index.find(namespace, hashes, fields) == [None] * len(keys)
    assert list(bulk.scan(f"{namespace}/")) == []


def test_a_salted_prompt_finds_nothing_of_the_unsalted_one() -> None:
    bulk, index = MemoryStore(), MemoryIndex()
    keys = save(bulk, index, TOKENS)
    namespace, fields = keys[0].namespace, [keys[0].field]
    plain = prefix_hashes(namespace, TOKENS, CHUNK)
    assert None not in index.find(namespace, plain, fields)
    for salt in ("", "red", "\x00"):
        salted = prefix_hashes(namespace, TOKENS, CHUNK, PromptExtras(salt=salt))
        assert index.find(namespace, salted, fields) == [None] * len(salted)
