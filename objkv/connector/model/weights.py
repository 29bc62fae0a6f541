"""Identifies weights by a digest of the model's files, which is the same on every replica.

By default the digest is sampled, because hashing 140 GB at every start is slow. Every tensor of a
safetensors file contributes its name, dtype, shape and up to eight of its pages. A fine-tune, a
merge or another checkpoint therefore has another digest, but a manual change of a few bytes may
not. ``weights_digest=full`` reads everything. Files without an index of tensors (``.bin``, ``.pt``,
``.pth``, ``.gguf``) are always read whole, because samples would cover only a few layers.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from objkv.background import Steps, at_once
from objkv.config import Config
from objkv.errors import ConfigError

logger = logging.getLogger(__name__)

_SCHEMES = {False: "objkv-weights-sampled-2", True: "objkv-weights-full-1"}
"""Names of the recipes for digests: sampled (False) and full (True). A new recipe needs a new
name."""
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
_PIECE = 8 << 20
_THREADS_MAX = 4
"""SHA-256 runs at 1 to 2 GB/s per core. More threads only slow the engine's start."""


def weights_digest(folder: Path, *, full: bool = False) -> str | None:
    """Return the digest of configuration and weights in ``folder``, ``sampled:…`` or ``full:…``.
    None if ``folder`` has no weights. Raises ``OSError``."""
    weights = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not weights:
        return None
    digest = hashlib.sha256(_SCHEMES[full].encode())
    for path in (folder / name for name in _CONFIG_FILES):
        if path.is_file():
            _add(digest, path.name.encode(), path.read_bytes())
    contents = _whole(weights) if full else _sampled(weights)
    for path, content in zip(weights, contents, strict=True):
        _add(digest, path.name.encode(), str(path.stat().st_size).encode(), content)
    return f"{'full' if full else 'sampled'}:{digest.hexdigest()[:40]}"


def read_weights(vllm_config: Any, config: Config, *, draft: bool = False) -> str:
    """Return the digest of an engine's weights, or of its draft's, or their revision if they cannot
    be read here. Raises ``ConfigError``, which names the fix, without either. ``vllm_config``: of
    any version."""
    model, fix = vllm_config.model_config, "set --revision"
    if draft:
        model = vllm_config.speculative_config.draft_model_config
        fix = "set the draft's 'revision'"
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy:seed={model.seed}"
    folder = local_folder(model.model, model.revision)
    full = config.weights_digest == "full"
    if folder is not None and (digest := weights_digest(folder, full=full)) is not None:
        return digest
    if model.revision is not None:
        return f"revision:{model.revision}"
    raise ConfigError(
        f"objkv cannot identify the weights of {model.model!r}, because it cannot read them here: "
        f"serve from a local folder or {fix}"
    )


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of a LoRA adapter in order. Raises ``OSError``."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (*_WEIGHT_SUFFIXES, ".json"))
    return [path for path in files if path.is_file()]


def adapter_digest(files: Sequence[Path]) -> Steps[str | None]:
    """Return the SHA-256 of a LoRA adapter's configuration and weights in hex, or None without
    weights. In steps of a few milliseconds, so that others need not wait for all of it."""
    if not any(p.suffix in _WEIGHT_SUFFIXES for p in files):
        return None
    digest = hashlib.sha256(b"objkv-adapter-1")
    for path in files:
        _add(digest, path.name.encode())
        with path.open("rb", buffering=0) as file:
            left = os.fstat(file.fileno()).st_size
            digest.update(left.to_bytes(8, "little"))
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)
                yield None
    return digest.hexdigest()


def adapter_content(folder: Path) -> bytes | None:
    """Return the digest of the adapter in ``folder``, at once; None without weights."""
    digest = at_once(adapter_digest(adapter_files(folder)))
    return None if digest is None else bytes.fromhex(digest)


def local_folder(model: str, revision: str | None, file_name: str = "config.json") -> Path | None:
    """Return the folder of the model's files: the path itself, or the hub's cache. Never downloads.

    ``file_name``: a file that every model of that kind has.
    """
    path = Path(os.path.expanduser(model))  # raises nothing without a home
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, file_name, revision=revision)
    except ValueError:  # not a hub id, such as an object store's URL
        return None
    return Path(found).parent if isinstance(found, str) else None


def _add(digest: "hashlib._Hash", *fields: bytes) -> None:
    for value in fields:
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)


def _sampled(paths: Sequence[Path]) -> list[bytes]:
    """Return a SHA-256 per file: of samples of its tensors, or of all bytes without an index of
    tensors."""
    spans = {path: found for path in paths if (found := _tensor_spans(path)) is not None}
    unindexed = [path for path in paths if path not in spans]
    whole = dict(zip(unindexed, _whole(unindexed), strict=True))
    return [whole[path] if path in whole else _sample(path, spans[path]) for path in paths]


def _sample(path: Path, spans: Sequence[tuple[int, int]]) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for start, end in _pages(spans):
            digest.update(os.pread(file.fileno(), end - start, start))
    return digest.digest()


def _whole(paths: Sequence[Path]) -> list[bytes]:
    """Return the SHA-256 of every file, several in parallel."""
    with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool:
        return list(pool.map(_read_whole, paths))


def _read_whole(path: Path) -> bytes:
    digest, piece = hashlib.sha256(), bytearray(_PIECE)
    with path.open("rb", buffering=0) as file:
        gib = os.fstat(file.fileno()).st_size / 2**30
        logger.info("hashing all of a file of weights gib=%.1f path=%s", gib, path)
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.digest()


def _pages(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges to hash, up to about eight per span."""
    for start, end in spans:
        step = max(_PAGE, (end - start) // _PAGES_PER_TENSOR)
        for offset in range(start, end, step):
            yield offset, min(offset + _PAGE, end)


def _tensor_spans(path: Path) -> list[tuple[int, int]] | None:
    """Return the byte ranges of a safetensors file's header and tensors. None if the file has no
    valid index that covers all of it."""
    if path.suffix != ".safetensors":
        return None
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        if not 0 < length <= min(size - 8, _SAFETENSORS_HEADER_MAX):
            return None
        header = os.pread(file.fileno(), length, 8)
    try:
        values = json.loads(header).items()
        tensors = [v["data_offsets"] for k, v in values if k != "__metadata__"]
        data = sorted((8 + length + int(a), 8 + length + int(b)) for a, b in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    starts, ends = [start for start, _ in data], [end for _, end in data]
    if [*starts, size] != [8 + length, *ends] or any(end < start for start, end in data):
        return None  # not contiguous, as the format requires
    # The header lists every tensor with its dtype and shape, so hash all of it, page by page.
    return [(o, min(o + _PAGE, 8 + length)) for o in range(0, 8 + length, _PAGE)] + data
