"""Sealed payloads: holders of the keys get back the same pages, by either way of reading."""

import base64
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec.payload import (
    CODECS,
    Claim,
    Provenance,
    check_frames,
    payload_bytes_max,
    read_header,
    recode,
)
from objkv.codec.seal import AesFrames, Seal, SealKey, keys_of, parse_keys
from objkv.codec.values import FramePosition
from objkv.errors import PayloadError
from tests.codec.payloads import CLAIM, LAYERS, PROVENANCE, noise, pages_of, pages_read, sample
from tests.codec.seals import ENCRYPTER, SEALS, SIGNER
from tests.support.payloads import open_payload

KINDS = sorted(SEALS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS)
def test_a_payload_that_is_sealed_later_has_the_header_that_is_read(kind: str, codec: str) -> None:
    payload, header = recode(memoryview(sample()), codec=codec, seal=SEALS[kind])
    found = open_payload(payload, CLAIM, LAYERS, seal=SEALS[kind])
    assert header == found == read_header(payload, seal=SEALS[kind])
    assert pages_read(payload, SEALS[kind]) == pages_of(LAYERS)
    assert check_frames(header, payload) == len(LAYERS)
    assert header.codec == codec + "+aes256gcm" * bool(SEALS[kind].encrypter)
    assert payload.nbytes <= payload_bytes_max(LAYERS)
    other = replace(CLAIM, token_end=CLAIM.token_end + 1)
    with pytest.raises(PayloadError):  # rightly sealed, but of another chunk
        open_payload(payload, other, LAYERS, seal=SEALS[kind])


def test_who_has_no_seal_reads_what_was_signed_but_not_what_was_encrypted() -> None:
    assert pages_read(sample(seal=SEALS["signed"]), None) == pages_of(LAYERS)
    payload = sample("blosc", seal=SEALS["encrypted"])
    header = read_header(payload)
    assert header.marks.encrypted_by == ENCRYPTER.id
    assert check_frames(header, payload) == len(LAYERS)  # damage shows without a key
    with pytest.raises(PayloadError, match="this process has no key"):
        pages_read(payload, None)


def test_every_key_that_is_known_opens_and_the_first_one_seals() -> None:
    old, new = SealKey("old", "*", b"o" * 32), SealKey("new", "*", b"n" * 32)
    before, during, after = Seal([old], [old]), Seal([new, old], [new, old]), Seal([new], [new])
    first, second = (sample(seal=seal) for seal in (before, during))
    assert pages_read(first, during) == pages_read(second, during) == pages_of(LAYERS)
    assert pages_read(second, after) == pages_of(LAYERS)
    for seal, payload in ((after, first), (before, second)):
        with pytest.raises(PayloadError, match="which this process does not have"):
            read_header(payload, seal=seal)


def test_an_encrypted_payload_tells_nothing_that_a_guess_could_be_compared_with() -> None:
    plain = sample("blosc")
    one, other = sample("blosc", seal=SEALS["encrypted"]), sample("blosc", seal=SEALS["encrypted"])
    first, second, clear = read_header(one), read_header(other), read_header(plain)
    start = first.data_start
    assert one[start:] != other[start:]
    for header in (first, second):
        assert PROVENANCE.token_digest not in str(header)
        assert not {*clear.frames.checksums, *clear.frames.raw_checksums} & {
            *header.frames.checksums,
            *header.frames.raw_checksums,
        }
    assert first.provenance.token_digest != second.provenance.token_digest
    assert not set(first.frames.raw_checksums) & set(second.frames.raw_checksums)


def test_token_ids_are_never_written_beside_encrypted_pages() -> None:
    told = Provenance("0" * 64, "w", 0, (1, 2))
    with pytest.raises(AssertionError, match="prompt"):
        sample(provenance=told, seal=SEALS["encrypted"])
    assert read_header(sample(provenance=told, seal=SEALS["signed"]), seal=SEALS["signed"])


def test_no_key_is_in_what_is_shown() -> None:
    seal = SEALS["signed and encrypted"]
    payload = sample(seal=SEALS["signed and encrypted"])
    header = open_payload(payload, CLAIM, LAYERS, seal=seal)
    assert header.cipher is not None
    shown = repr([seal, SIGNER, header, header.is_sealed, str(header.cipher), vars(seal)])
    for key in (SIGNER, ENCRYPTER):
        assert key.id in shown
        assert key.secret.hex() not in shown
        assert repr(key.secret)[2:-1] not in shown
    assert seal.key_ids == "signing ['sign-1'], encryption ['encrypt-1']"


PLACE = FramePosition(1, "none+aes256gcm", LAYERS[0])
ELSEWHERE = {
    "number": (CLAIM, 3, "cd", PLACE._replace(number=2)),
    "codec": (CLAIM, 3, "cd", PLACE._replace(codec="lz4+aes256gcm")),
    "name": (CLAIM, 3, "cd", PLACE._replace(layer=replace(LAYERS[0], name="other"))),
    "dtype": (CLAIM, 3, "cd", PLACE._replace(layer=replace(LAYERS[0], dtype="F16"))),
    "shape": (CLAIM, 3, "cd", PLACE._replace(layer=replace(LAYERS[0], shape=(2, 2, 32, 16)))),
    "scales": (CLAIM, 3, "cd", PLACE._replace(layer=replace(LAYERS[0], scales="1.0 0.5"))),
    "frames": (CLAIM, 4, "cd", PLACE),
    "tokens": (CLAIM, 3, "ce", PLACE),
    "parent": (replace(CLAIM, parent_hash=b"\x03" * 20), 3, "cd", PLACE),
    "range": (replace(CLAIM, token_end=513), 3, "cd", PLACE),
    "key": (replace(CLAIM, key=replace(CLAIM.key, group=1)), 3, "cd", PLACE),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_an_encrypted_frame_is_of_one_place_of_one_claim(what: str) -> None:
    """By its tag alone, whatever the signature."""

    def cipher(claim: Claim, frames: int, tokens: str) -> AesFrames:
        made = AesFrames(ENCRYPTER.secret, bytes(32), claim, frames)
        made.bind(tokens * 32)
        return made

    stored, out = bytearray(noise(64)), memoryview(bytearray(64))
    tag = cipher(CLAIM, 3, "cd").encrypt(PLACE, stored, memoryview(stored))
    cipher(CLAIM, 3, "cd").decrypt(PLACE, memoryview(stored), out, tag)
    assert bytes(out) == noise(64)
    claim, frames, tokens, place = ELSEWHERE[what]
    with pytest.raises(PayloadError, match="was not encrypted for this claim"):
        cipher(claim, frames, tokens).decrypt(place, memoryview(stored), out, tag)


ONE, OTHER = Random(1).randbytes(32), Random(2).randbytes(32)
LINES = f"""
# what signs since May
new   *  {ONE.hex()}
old   *  {base64.b64encode(OTHER).decode()}   # until June

acme-1 acme {base64.urlsafe_b64encode(OTHER).decode().rstrip("=")}
"""


def test_keys_are_lines_of_id_tenant_and_key() -> None:
    assert parse_keys(LINES) == [
        SealKey("new", "*", ONE),
        SealKey("old", "*", OTHER),
        SealKey("acme-1", "acme", OTHER),
    ]


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
    "[]": "line 1 has 1 words",
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_told_and_no_key_with_it(text: str) -> None:
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        parse_keys(text)
    for secret in (ONE, OTHER):
        assert secret.hex()[:16] not in str(caught.value)
    assert caught.value.__context__ is None


@settings(max_examples=50)
@given(st.text() | st.text(st.sampled_from("a *#\n0")))
def test_any_text_is_keys_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_keys(text)
