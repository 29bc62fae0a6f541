"""Which weights these are: a digest of what the model is loaded from, the same on every replica.

Sampled, because hashing 140 GB at start is too slow: every tensor contributes its name, dtype,
shape and up to eight of its pages, so a fine-tune, a merge or another checkpoint differs. Weights
that were changed in a few bytes by hand do not; raise ``weights_epoch`` for those.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

_PAGE = 4096
_PAGES_PER_TENSOR = 8
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_CONFIG_FILES = (
    "config.json",
    "params.json",  # Mistral's own format
    "preprocessor_config.json",
    "processor_config.json",
)
_SAFETENSORS_HEADER_MAX = 100 << 20


def weights_digest(folder: Path) -> str | None:
    """``sha256:…`` over configuration and weights in ``folder``; None if there are no weights."""
    files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not files:
        return None
    digest = hashlib.sha256(b"objkv-weights-1")
    for path in (folder / name for name in _CONFIG_FILES):
        if path.is_file():
            _add(digest, path.name.encode(), path.read_bytes())
    for path in files:
        _add(digest, path.name.encode(), str(path.stat().st_size).encode())
        with path.open("rb", buffering=0) as file:
            for start, end in _pages(path, file.fileno()):
                digest.update(os.pread(file.fileno(), end - start, start))
    return f"sha256:{digest.hexdigest()[:40]}"


def adapter_digest(folder: Path) -> bytes | None:
    """SHA-256 over a LoRA adapter's configuration and whole weights; None if it has none."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (*_WEIGHT_SUFFIXES, ".json"))
    if not any(p.suffix in _WEIGHT_SUFFIXES for p in files):
        return None
    digest = hashlib.sha256(b"objkv-adapter-1")
    for path in files:
        _add(digest, path.name.encode(), path.read_bytes())
    return digest.digest()


def local_folder(model: str, revision: str | None) -> Path | None:
    """Where the model's files are: the path itself, or the hub's cache; never downloads."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # not a hub id at all, e.g. an object store's URL
        return None
    return Path(found).parent if isinstance(found, str) else None


def _add(digest: "hashlib._Hash", *fields: bytes) -> None:
    for value in fields:
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)


def _pages(path: Path, descriptor: int) -> Iterator[tuple[int, int]]:
    """Byte ranges to hash: the header and samples of each tensor, or of the file as one piece."""
    size = os.fstat(descriptor).st_size
    spans = _tensor_spans(descriptor, size) if path.suffix == ".safetensors" else [(0, size)]
    for start, end in spans:
        step = max(_PAGE, (end - start) // _PAGES_PER_TENSOR)
        for offset in range(start, end, step):
            yield offset, min(offset + _PAGE, end)


def _tensor_spans(descriptor: int, size: int) -> list[tuple[int, int]]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(size - 8, _SAFETENSORS_HEADER_MAX):
        return [(0, size)]
    try:
        header = json.loads(os.pread(descriptor, length, 8))
        tensors = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
        data = sorted((8 + length + int(a), 8 + length + int(b)) for a, b in tensors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return [(0, size)]
    # The header names every tensor, its dtype and shape: take all of it, page by page.
    return [(o, min(o + _PAGE, 8 + length)) for o in range(0, 8 + length, _PAGE)] + data
