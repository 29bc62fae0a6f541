"""How payloads are cut into requests."""

from hypothesis import given
from hypothesis import strategies as st

from objkv.codec.payload import CODECS, LayerSpec, encode, payload_bytes_max, read_header
from objkv.transfer.queue import opening_bytes, remaining, span_count
from tests.codec.payloads import CLAIM, PROVENANCE, layer_lists, pages_of

MIB = 1 << 20


@given(layer_lists, st.sampled_from(CODECS), st.integers(1, 5))
def test_spans_are_the_payload_once_and_the_first_brings_its_share_of_layers(
    layers: list[LayerSpec], codec: str, count: int
) -> None:
    payload = encode(CLAIM, layers, pages_of(layers), codec=codec, provenance=PROVENANCE)
    header = read_header(payload)
    nbytes = opening_bytes(layers, count, tokens=0)
    whole = [f for f in header.frames if f.offset + f.nbytes <= nbytes]
    assert header.data_start <= nbytes <= payload_bytes_max(layers)
    assert len(whole) * count >= len(layers)
    spans = remaining(header, len(whole), count)
    assert 1 <= len(spans) <= count
    assert [span.number for span in spans] == list(range(1, len(spans) + 1))
    assert [span.last for span in spans] == [False] * (len(spans) - 1) + [True]
    at, layer = header.nbytes if len(whole) == len(layers) else 0, len(whole)
    at = at or header.frames[layer].offset
    for span in spans:
        assert (span.first, span.start) == (layer, at)
        layer, at = span.end, at + span.nbytes
    assert (layer, at) == (len(layers), header.nbytes)


def test_a_small_payload_is_one_request_and_a_large_one_at_most_so_many() -> None:
    def spans(nbytes: int, layers: int = 32) -> int:
        return span_count(nbytes, layers, spans_max=4, span_bytes_min=MIB)

    assert [spans(n) for n in (0, MIB - 1, MIB, 2 * MIB, 64 * MIB)] == [1, 1, 1, 2, 4]
    assert spans(64 * MIB, layers=2) == 2
