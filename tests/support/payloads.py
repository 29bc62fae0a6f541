"""Reading a whole payload at once."""

from objkv.codec.compress import Buffer
from objkv.codec.payload import read_claimed
from objkv.codec.seal import Seal
from objkv.codec.values import Claim, Header, LayerSpec, check_layers
from objkv.errors import PayloadError


def open_payload(
    payload: Buffer, claim: Claim, layers: tuple[LayerSpec, ...], *, seal: Seal | None = None
) -> Header:
    header = read_claimed(payload, claim, layers, seal=seal)
    check_layers(header.frames.layers, layers)
    nbytes = memoryview(payload).nbytes
    if header.nbytes != nbytes:
        raise PayloadError(f"the payload has {nbytes} bytes, its header announces {header.nbytes}")
    return header
