"""Writes the golden payloads beside this file: ``python -m tests.vectors.make_payloads``.

Run it for a new codec, and commit only that codec's file; or when the format changes on purpose,
under another format name. What is stored in buckets stays as these files are. Compressed frames may
come out different with another version of a compression library, so tests compare their decoded
pages, and bytes only where codec is none.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from objkv.codec.payload import Claim, LayerSpec, Provenance, encode
from objkv.codec.seal import Seal, SealKey
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import prefix_hashes, root_hash, token_digest
from objkv.keys.topology import Shard

FOLDER = Path(__file__).parent
NAMESPACE = "38f920e32fa90af18c27a94b23552d9c"
TOKENS = tuple(range(1000, 1032))
CLAIM = Claim(
    ChunkKey(NAMESPACE, prefix_hashes(NAMESPACE, TOKENS, 32)[0], 0, Shard(0, 3, 0, 2)),
    root_hash(NAMESPACE),
    0,
    32,
)
PROVENANCE = Provenance(token_digest(TOKENS), "golden", 1_700_000_000)
LAYERS = (
    LayerSpec("model.layers.2.self_attn.attn", "BF16", (2, 2, 16, 64)),
    LayerSpec("model.layers.10.self_attn.attn", "F8_E4M3", (2, 2, 16, 8)),
    LayerSpec('an "odd" näme', "F32", (2, 2, 16, 32)),
)
# Published, so worth nothing: bytes 0 to 31, and 32 to 63.
SIGNING_KEY = SealKey("golden-s", "*", bytes(range(32)))
ENCRYPTION_KEY = SealKey("golden-e", "*", bytes(range(32, 64)))
SALT = bytes(range(64, 96))
"""In place of a random one."""
SEALS = {
    "signed": Seal([SIGNING_KEY]),
    "encrypted": Seal((), [ENCRYPTION_KEY]),
    "signed-encrypted": Seal([SIGNING_KEY], [ENCRYPTION_KEY]),
}


def pages_of(layer: LayerSpec) -> bytes:
    """Where elements are one byte, pages that do not compress: SHA-256 of 0, 1, 2, ... as 4 bytes
    little-endian. Otherwise element ``i`` is ``i // 4`` modulo 251 in all its bytes."""
    items = layer.nbytes // layer.item_bytes
    if layer.item_bytes == 1:
        return b"".join(sha256(i.to_bytes(4, "little")).digest() for i in range(items // 32))
    return b"".join(bytes([i // 4 % 251]) * layer.item_bytes for i in range(items))


def _made(
    codec: str = "none", layers: Sequence[LayerSpec] = LAYERS, seal: Seal | None = None, **told: Any
) -> bytes:
    pages = list(map(pages_of, layers))
    provenance = replace(PROVENANCE, **told)
    return bytes(encode(CLAIM, layers, pages, codec=codec, provenance=provenance, seal=seal))


@patch("os.urandom", lambda _: SALT)
def golden() -> dict[str, bytes]:
    """Every golden payload by its file name."""
    # A dtype that safetensors readers need not know is stored as U8.
    odd = LayerSpec("model.layers.0.self_attn.attn", "F8_E4M3FNUZ", (2, 2, 16, 8))
    quantised = replace(odd, dtype="F8_E5M2", scales="0.0625 1.0")
    made = {codec: _made(codec) for codec in ("none", "lz4", "blosc", "blosclz4")}
    made["tokens"] = _made(tokens=TOKENS)
    made["untyped"] = _made(layers=[odd])
    made["scales"] = _made(layers=[quantised, LAYERS[0]])
    made |= {name: _made(seal=seal) for name, seal in SEALS.items()}
    made["blosc-signed-encrypted"] = _made("blosc", seal=SEALS["signed-encrypted"])
    return {f"{name}.safetensors": payload for name, payload in made.items()}


if __name__ == "__main__":
    for name, payload in golden().items():
        (FOLDER / name).write_bytes(payload)
