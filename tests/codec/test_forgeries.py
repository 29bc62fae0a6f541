"""An attacker who may write to the bucket, but has no key, cannot make a reader load forged
payloads.

Here the attacker takes apart existing payloads, puts any bytes anywhere, and makes every checksum
right again, because checksums need no key.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objkv.codec import payload as payload_module
from objkv.codec.payload import CODECS, check_frames, frame_pages, read_header
from objkv.codec.seal import Seal, SealKey
from objkv.codec.values import digest
from objkv.errors import PayloadError
from tests.codec.payloads import (
    LAYERS,
    is_refused,
    noise,
    pages_of,
    pages_read,
    rechecked,
    reworked,
    sample,
    split,
)
from tests.codec.seals import KEYS, SEALS, other_seal

KINDS = sorted(SEALS)
PAGES = pages_of(LAYERS)
OTHER_PAGES = [noise(layer.nbytes, 7 + i) for i, layer in enumerate(LAYERS)]


SAMPLES = {(kind, codec): sample(codec, seal=SEALS[kind]) for kind in KINDS for codec in CODECS}


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_of_a_signed_header_can_be_changed(kind: str) -> None:
    seal, payload = SEALS[kind], SAMPLES[kind, "blosc"]
    start = read_header(payload).data_start
    text_end = payload.index(b"  ", 8, start)
    for at in [*range(text_end + 2), start - 1]:
        changed = bytearray(payload[:start])
        changed[at] ^= 1 << (at % 7)
        with pytest.raises(PayloadError):
            read_header(changed, seal=seal)
        if not 37 <= at < 69:
            with pytest.raises(PayloadError):
                read_header(rechecked(changed), seal=seal)


@settings(max_examples=50)
@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_no_byte_of_a_frame_can_be_changed(which: tuple[str, str], data: st.DataObject) -> None:
    """Although every checksum is made right: that of the frame, and that of the header."""
    payload, seal = bytearray(SAMPLES[which]), SEALS[which[0]]
    header = read_header(payload)
    number = data.draw(st.integers(0, len(LAYERS) - 1))
    frame = header.frames[number]
    at = frame.offset + data.draw(st.integers(0, frame.nbytes - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    assert is_refused(payload, seal)
    now = digest(payload[frame.offset : frame.offset + frame.nbytes])
    head = payload[: header.data_start].replace(frame.checksum.encode(), now.encode())
    forged = rechecked(head) + payload[header.data_start :]
    assert read_header(forged).frames.checksums[number] == now
    assert is_refused(forged, seal)


Change = Callable[[dict[str, Any]], Any]


def metadata(name: str, change: Callable[[str], str]) -> Change:
    def apply(document: dict[str, Any]) -> None:
        told = document["__metadata__"]
        told[name] = change(told[name])

    return apply


def swapped(one: str, other: str) -> Change:
    def apply(document: dict[str, Any]) -> None:
        told = document["__metadata__"]
        told[one], told[other] = told[other], told[one]

    return apply


def renamed(document: dict[str, Any]) -> None:
    document["model.layers.3.attn"] = document.pop(LAYERS[0].name)


def last_digit(text: str) -> str:
    return text[:-1] + ("0" if text[-1] != "0" else "1")


SAID: dict[str, Change] = {
    "chunk": metadata("chunk", lambda text: "ac" + text[2:]),
    "hash": metadata("chunk", lambda text: text[:32] + "f" * 40 + text[72:]),
    "group": metadata("chunk", lambda text: text[:-1] + "1"),
    "shard": metadata("shard", lambda text: text.replace("H0-2", "H0-3")),
    "parent": metadata("parent", last_digit),
    "start": metadata("token_start", lambda _: "255"),
    "end": metadata("token_end", lambda _: "513"),
    "tokens": metadata("token_digest", last_digit),
    "layer": renamed,
    "dtype": metadata("frame.0", lambda text: text.replace("BF16", "F16")),
    "shape": metadata("frame.0", lambda text: text.replace("2x2x16x32", "2x2x32x16")),
    "scales": lambda document: document["__metadata__"].update({"scales.0": "1.0 0.5"}),
    "order": swapped("frame.0", "frame.1"),
    # For audits; only a signature protects them.
    "writer": metadata("writer", lambda _: "nobody"),
    "time": metadata("created_s", lambda _: "1"),
    "unknown name": lambda document: document["__metadata__"].update(more="x"),
}


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAID)
def test_nothing_that_a_payload_says_can_be_changed(name: str, kind: str, codec: str) -> None:
    """Not even for a reader who expects exactly the forged values."""
    seal = SEALS[kind]
    document, frames = split(SAMPLES[kind, codec])
    SAID[name](document)
    forged = reworked(document, frames)
    try:
        told = read_header(forged)
    except PayloadError:
        assert name in ("dtype", "shape")
        return
    assert is_refused(forged, seal, told.claim, told.frames.layers)


@given(st.sampled_from(sorted(SAMPLES)), st.data())
def test_no_stretch_written_over_reaches_the_model(
    which: tuple[str, str], data: st.DataObject
) -> None:
    payload, start = bytearray(SAMPLES[which]), read_header(SAMPLES[which]).data_start
    at = data.draw(st.integers(0, len(payload) - 1))
    new = data.draw(st.binary(min_size=1, max_size=80))
    payload[at : at + len(new)] = new
    for one in (bytes(payload), rechecked(payload[:start]) + payload[start:]):
        with suppress(PayloadError):
            assert pages_read(one, SEALS[which[0]]) == PAGES


def grafted(one: bytes, other: bytes) -> bytes:
    """The header of one payload, and the frames of another."""
    start = read_header(one).data_start
    return one[:start] + other[read_header(other).data_start :]


@pytest.mark.parametrize("kind", KINDS)
def test_frames_cannot_be_swapped_between_two_payloads(kind: str) -> None:
    seal = SEALS[kind]
    one, other = sample(seal=seal), sample(seal=seal, pages=OTHER_PAGES)
    assert pages_read(other, seal) == OTHER_PAGES
    assert is_refused(grafted(one, other), seal)
    # With all metadata of the other header's frames, but with the first one's signature.
    document, frames = split(one)
    theirs, their_frames = split(other)
    for name, text in theirs["__metadata__"].items():
        if name.startswith(("frame.", "sha256.")):
            document["__metadata__"][name] = text
    assert is_refused(reworked(document, their_frames), seal)
    # One frame of the other payload, its sums and tag with it.
    size = LAYERS[0].nbytes
    document, frames = split(one)
    for name in ("frame.0", "sha256.0"):
        if name in theirs["__metadata__"]:
            document["__metadata__"][name] = theirs["__metadata__"][name]
    assert is_refused(reworked(document, their_frames[:size] + frames[size:]), seal)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_cannot_be_swapped_within_a_payload(kind: str) -> None:
    """All layers are of one size and one shape."""
    document, frames = split(sample(seal=SEALS[kind]))
    size = LAYERS[0].nbytes
    moved = frames[size : 2 * size] + frames[:size] + frames[2 * size :]
    assert is_refused(reworked(document, moved), SEALS[kind])
    told = document["__metadata__"]
    for name in ("frame", "sha256"):
        if f"{name}.0" in told:
            told[f"{name}.0"], told[f"{name}.1"] = told[f"{name}.1"], told[f"{name}.0"]
    assert is_refused(reworked(document, moved), SEALS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_another_tenants_payload_is_refused(kind: str) -> None:
    """By its keys, even if it is of the right name: their namespace was never the question."""
    theirs = Seal(*([SealKey("x", "theirs", b"t" * 32) for _ in some] for some in KEYS[kind]))
    payload = sample(seal=theirs)
    assert pages_read(payload, theirs) == PAGES
    assert is_refused(payload, SEALS[kind])
    # And if they call their key as ours is called.
    assert is_refused(sample(seal=other_seal(kind)), SEALS[kind])


def test_a_key_signs_under_its_own_id_only() -> None:
    first, second = SealKey("a", "*", b"a" * 32), SealKey("b", "*", b"b" * 32)
    both = Seal([first, second])
    payload = sample(seal=both)
    assert read_header(payload, seal=both).marks.signed_by == "a"
    for other in (b"b", b"c", b"", b"*", b"a ", b" a", b"A"):
        head = payload.replace(b' a","format"', b' %s","format"' % other, 1)
        start = read_header(payload).data_start
        padded = head[:start] if len(head) >= start else head
        with pytest.raises(PayloadError):
            read_header(rechecked(padded.ljust(start)), seal=both)


def test_a_key_of_one_kind_is_none_of_the_other() -> None:
    """Also if it is the same key."""
    key = SealKey("k", "*", b"k" * 32)
    ways = {"signed": Seal([key]), "encrypted": Seal((), [key]), "both": Seal([key], [key])}
    for made, maker in ways.items():
        for read, reader in ways.items():
            assert is_refused(sample(seal=maker), reader) == (made != read)
    with pytest.raises(PayloadError, match="not encrypted"):
        read_header(sample(seal=ways["signed"]), seal=ways["both"])
    with pytest.raises(PayloadError, match="has no encryption key"):
        read_header(sample(seal=ways["both"]), seal=ways["signed"])


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_seal_cannot_be_taken_off(kind: str, codec: str) -> None:
    seal = SEALS[kind]
    assert is_refused(sample(codec), seal)
    document, frames = split(SAMPLES[kind, codec])
    told = document["__metadata__"]
    for names in (["signature"], ["encryption"], ["signature", "encryption"]):
        stripped = {**document, "__metadata__": {n: t for n, t in told.items() if n not in names}}
        if len(stripped["__metadata__"]) < len(told):
            assert is_refused(reworked(stripped, frames), seal)
    bare = {name: text for name, text in told.items() if not name.startswith("sha256.")}
    if len(bare) < len(told):
        assert is_refused(reworked({**document, "__metadata__": bare}, frames), seal)


def test_an_encrypted_frame_cannot_be_replaced_by_a_plain_one() -> None:
    for kind in ("encrypted", "signed and encrypted"):
        document, frames = split(sample(seal=SEALS[kind]))
        plain, plain_frames = split(sample(pages=OTHER_PAGES))
        size, name = LAYERS[0].nbytes, LAYERS[0].name
        document["__metadata__"]["frame.0"] = plain["__metadata__"]["frame.0"]
        document[name] = plain[name]
        forged = reworked(document, plain_frames[:size] + frames[size:])
        assert read_header(forged).codec == "mixed"
        assert is_refused(forged, SEALS[kind])


TAGS = ["", "00", "0" * 30, "g" * 32, "0" * 34]
SALTS = ["0" * 64, "", "0" * 62, "x" * 64]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [*(("frame.0", "[0-9a-f]{32}$", tag) for tag in TAGS)]
    + [("encryption", "^[0-9a-f]{64}", salt) for salt in SALTS],
)
def test_another_tag_or_salt_opens_nothing(name: str, old: str, new: str) -> None:
    document, frames = split(sample(seal=SEALS["encrypted"]))
    told = document["__metadata__"]
    before, told[name] = told[name], re.sub(old, new, told[name])
    assert told[name] != before
    assert is_refused(reworked(document, frames), SEALS["encrypted"])


def test_a_header_with_two_signatures_is_refused() -> None:
    payload = sample(seal=SEALS["signed"])
    start = read_header(payload).data_start
    head = payload[:start].replace(b',"format"', b',"signature":"x","format"', 1)
    head = head[:8] + head[8:].rstrip(b" ").ljust(start - 8)
    with pytest.raises(PayloadError):
        read_header(rechecked(head), seal=SEALS["signed"])


@pytest.mark.parametrize("codec", ["none", "blosc"])
@pytest.mark.parametrize("kind", KINDS)
def test_who_finds_other_bytes_of_the_same_checksum_has_found_nothing(
    kind: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums are not cryptographic: here every frame has the one in its header."""
    seal, payload = SEALS[kind], bytearray(SAMPLES[kind, codec])
    header = read_header(payload, seal=seal)
    scratch = memoryview(bytearray(LAYERS[0].nbytes))
    for number in range(len(LAYERS)):
        told = header.frames.checksums[number]
        monkeypatch.setattr(payload_module, "digest", lambda _, told=told: told)
        at = header.frames.starts[number]
        payload[at] ^= 1
        with pytest.raises(PayloadError):
            frame_pages(header, number, payload, scratch)
        if not seal.encrypter:
            with pytest.raises(PayloadError):
                check_frames(header, payload[: header.frames.ends[number]], number)
        payload[at] ^= 1


def test_reworking_alone_changes_nothing() -> None:
    """Else the tests here would prove nothing."""
    for payload in SAMPLES.values():
        assert reworked(*split(payload)) == payload
