"""Documents of keys, as operators write them and as commands print them."""

import base64
import json
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec.seal import SealKey, keys_of, parse_keys

ONE, OTHER = Random(1).randbytes(32), Random(2).randbytes(32)
LINES = f"""
# what signs since May
new   *  {ONE.hex()}
old   *  {base64.b64encode(OTHER).decode()}   # until June

acme-1 acme {base64.urlsafe_b64encode(OTHER).decode().rstrip("=")}
"""


def test_lines_and_json_say_the_same() -> None:
    keys = parse_keys(LINES)
    assert keys == [
        SealKey("new", "*", ONE),
        SealKey("old", "*", OTHER),
        SealKey("acme-1", "acme", OTHER),
    ]
    document = [{"id": k.id, "tenant": k.tenant, "key": k.secret.hex()} for k in keys]
    assert parse_keys(json.dumps(document)) == keys


def test_a_tenant_with_keys_of_its_own_has_no_others() -> None:
    keys = parse_keys(LINES)
    assert [key.id for key in keys_of(keys, "acme")] == ["acme-1"]
    assert [key.id for key in keys_of(keys, "default")] == ["new", "old"]
    assert keys_of(keys[2:], "default") == []


BAD = {
    "": "no key",
    "# nothing": "no key",
    "a *": "line 1 has 2 words",
    f"a * {ONE.hex()} more": "line 1 has 4 words",
    f"\na/b * {ONE.hex()}": "line 2: the id",
    f"{'a' * 65} * {ONE.hex()}": "line 1: the id",
    f"a te/nant {ONE.hex()}": "line 1: the tenant",
    f"a ** {ONE.hex()}": "line 1: the tenant",
    f"a * {ONE.hex()[:-2]}": "line 1: the key must be 32 bytes",
    f"a * {ONE.hex()[:-1]}g": "line 1: the key must be 32 bytes",
    f"a * {base64.b64encode(ONE + b'x').decode()}": "line 1: the key must be 32 bytes",
    f"a * {'0' * 64}": "line 1: the key is not random",
    f"a * {ONE.hex()}\na * {OTHER.hex()}": "the same id",
    "[": "starts like JSON",
    "[" * 100_000: "starts like JSON",
    "{}": "an array",
    "[1]": "entry 1",
    '[{"id": "a"}]': "entry 1",
    '[{"id": "a", "tenant": "*", "key": 1}]': "entry 1: id, tenant and key must be strings",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_told_and_no_key_with_it(text: str) -> None:
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        parse_keys(text)
    for secret in (ONE, OTHER):
        assert secret.hex()[:16] not in str(caught.value)
    assert caught.value.__context__ is None


@settings(max_examples=50)
@given(st.text() | st.text(st.sampled_from('a *#\n[]{}":,0')))
def test_any_text_is_keys_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_keys(text)
