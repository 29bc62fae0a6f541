"""Frames in a header: the text of each, and the tensor that any safetensors reader sees."""

import re
from functools import lru_cache
from typing import Any

from objkv.codec.compress import CODECS
from objkv.codec.scales import is_scales
from objkv.codec.values import (
    DTYPE_BYTES,
    ENCRYPTED,
    LAYER_BYTES_MAX,
    NAME_CHARS_MAX,
    RAW_BYTES_MAX,
    TYPED_BYTES,
    Frame,
    Frames,
    LayerSpec,
)
from objkv.errors import PayloadError

_TENSOR = frozenset(("dtype", "shape", "data_offsets"))
_ONLY_INT = frozenset((int,))
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FRAME = re.compile(
    r"(?P<codec>[a-z0-9]{1,16})(?P<encrypted>\+aes256gcm)? (?P<dtype>[A-Z0-9_]{1,16}) "
    r"(?P<shape>[1-9][0-9]{0,18}(?:x[1-9][0-9]{0,18}){3}) "
    r"(?P<sums>[0-9a-f]{32}(?: [0-9a-f]{32}){0,2})"
)


def frame_metadata(number: int, frame: Frame) -> dict[str, str]:
    """What metadata says of the frame, in its order."""
    shape = "x".join(map(str, frame.layer.shape))
    parts = [frame.codec, frame.layer.dtype, shape, frame.checksum]
    encrypted = frame.codec.endswith(ENCRYPTED)
    if frame.codec.removesuffix(ENCRYPTED) != "none":
        parts.append(frame.raw_checksum)
    if encrypted:
        parts.append(frame.proof)
    metadata = {f"frame.{number}": " ".join(parts)}
    if frame.proof and not encrypted:
        metadata[f"sha256.{number}"] = frame.proof
    if frame.layer.scales:
        metadata[f"scales.{number}"] = frame.layer.scales
    return metadata


def tensor_of(frame: Frame) -> dict[str, Any]:
    """The tensor that holds the frame."""
    dtype, shape = _stored_as(frame.layer, frame.codec, frame.nbytes)
    span = [frame.offset, frame.offset + frame.nbytes]
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


def _stored_as(layer: LayerSpec, codec: str, nbytes: int) -> tuple[str, list[int]]:
    """Dtype and shape of the tensor that holds the frame, as any safetensors reader sees it."""
    if codec == "none" and layer.dtype in TYPED_BYTES:
        return layer.dtype, list(layer.shape)
    return "U8", [nbytes]


def read_frames(tensors: dict[str, Any], metadata: dict[str, str], data_start: int) -> Frames:
    """Frames in the order of their offsets, with neither gap nor overlap. Raises ``PayloadError``
    for anything else."""
    spans = sorted((_span(name, tensor), name) for name, tensor in tensors.items())
    if not spans:
        raise PayloadError("a payload without layers")
    frames: list[Frame] = []
    expected = raw_bytes = 0
    for number, ((start, end), name) in enumerate(spans):
        if start != expected or end <= start:
            raise PayloadError(f"layer {name!r}: bytes {start}-{end} where {expected} was due")
        expected = end
        frames.append(_frame(name, number, metadata, data_start + start, end - start))
        raw_bytes += frames[-1].layer.nbytes
        if raw_bytes > RAW_BYTES_MAX:
            raise PayloadError(f"more than {RAW_BYTES_MAX} bytes of pages")
        dtype, shape = _stored_as(frames[-1].layer, frames[-1].codec, end - start)
        tensor = tensors[name]
        if (tensor["dtype"], tensor["shape"]) != (dtype, shape):
            raise PayloadError(f"layer {name!r}: tensor and frame disagree")
    return Frames.of(frames)


def _span(name: str, tensor: Any) -> tuple[int, int]:
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise PayloadError(f"a layer's name of {len(name)} characters")
    if not isinstance(tensor, dict) or tensor.keys() != _TENSOR:
        raise PayloadError(f"layer {name!r}: not a tensor")
    span, shape = tensor["data_offsets"], tensor["shape"]
    # ``type`` and not ``isinstance``: True is an int to Python, and 1 == 1.0 == True.
    are_lists = isinstance(span, list) and isinstance(shape, list)
    if not are_lists or not {*map(type, span), *map(type, shape)} <= _ONLY_INT:
        raise PayloadError(f"layer {name!r}: shape and offsets must be lists of integers")
    if len(span) != 2:
        raise PayloadError(f"layer {name!r}: {len(span)} offsets")
    return span[0], span[1]


def _frame(name: str, number: int, metadata: dict[str, str], offset: int, nbytes: int) -> Frame:
    match = _FRAME.fullmatch(metadata.get(f"frame.{number}", ""))
    if match is None:
        raise PayloadError(f"layer {name!r}: its frame is missing or malformed")
    codec, dtype, encrypted = match["codec"], match["dtype"], match["encrypted"] or ""
    if codec not in CODECS or dtype not in DTYPE_BYTES:
        raise PayloadError(f"layer {name!r}: unknown codec {codec!r} or dtype {dtype!r}")
    scales = metadata.get(f"scales.{number}")
    if scales is not None and not is_scales(scales):
        raise PayloadError(f"layer {name!r}: malformed scales")
    layer, layer_bytes = _layer(name, dtype, match["shape"], scales or "")
    if layer_bytes > LAYER_BYTES_MAX:
        raise PayloadError(f"layer {name!r}: {layer_bytes} bytes")
    if nbytes != layer_bytes if codec == "none" else nbytes >= layer_bytes:
        raise PayloadError(f"layer {name!r}: {nbytes} bytes stored for {layer_bytes}")
    sums = match["sums"].split(" ")
    if len(sums) != 1 + (codec != "none") + bool(encrypted):
        raise PayloadError(f"layer {name!r}: malformed frame")
    proof = sums[-1] if encrypted else metadata.get(f"sha256.{number}", "")
    if not encrypted and proof and _DIGEST.fullmatch(proof) is None:
        raise PayloadError(f"layer {name!r}: malformed digest")
    raw_checksum = sums[0] if codec == "none" else sums[1]
    return Frame(layer, codec + encrypted, offset, nbytes, sums[0], raw_checksum, proof)


@lru_cache(maxsize=4096)
def _layer(name: str, dtype: str, shape: str, scales: str) -> tuple[LayerSpec, int]:
    """A layer and its bytes: the payloads of one model have the same ones over and over."""
    layer = LayerSpec(name, dtype, tuple(map(int, shape.split("x"))), scales)
    return layer, layer.nbytes
