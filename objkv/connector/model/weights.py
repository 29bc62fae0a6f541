"""Identifies weights, and LoRA adapters, by digests of their files. By default a digest is sampled,
because hashing 140 GB at every start is slow: every tensor of a safetensors file contributes its
name, dtype, shape and up to eight of its pages. A fine-tune, a merge or another checkpoint has
another digest, but a manual change of a few bytes may not. ``weights_digest=full`` reads
everything. Files without an index of tensors (``.bin``, ``.pt``, ``.pth``, ``.gguf``) are always
read whole, because samples would cover only a few layers."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from objkv.background import Steps
from objkv.config import Config
from objkv.errors import ConfigError

logger = logging.getLogger(__name__)

_SCHEMES = {False: "objkv-weights-sampled-2", True: "objkv-weights-full-1"}
"""Names of the recipes for digests, full or not. A new recipe needs a new name."""
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
    """Return ``sampled:…`` or ``full:…``, None if a folder has no weights. Raises ``OSError``."""
    weights = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not weights:
        return None
    digest = hashlib.sha256(_SCHEMES[full].encode())
    for path in (folder / name for name in _CONFIG_FILES):
        if path.is_file():
            _add(digest, path.name.encode(), path.read_bytes())
    with ThreadPoolExecutor(min(_THREADS_MAX, os.cpu_count() or 1)) as pool:
        contents = list(pool.map(partial(_content, full=full), weights))
    for path, content in zip(weights, contents, strict=True):
        _add(digest, path.name.encode(), str(path.stat().st_size).encode(), content)
    return f"{'full' if full else 'sampled'}:{digest.hexdigest()[:40]}"


def read_weights(vllm_config: Any, config: Config, *, draft: bool = False) -> str:
    """Return the digest of an engine's weights, or of its draft's, or their revision if they cannot
    be read here. Raises ``ConfigError`` without either. ``vllm_config``: of any version."""
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


def local_folder(model: str, revision: str | None, file_name: str = "config.json") -> Path | None:
    """Return the folder of the model's files: the path itself, or the hub's cache. Never downloads.
    ``file_name``: a file that every model of that kind has."""
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


def _content(path: Path, *, full: bool) -> bytes:
    """Return the SHA-256 of a file, or of samples if it lists its tensors and not ``full``."""
    spans = None if full else _tensor_spans(path)
    with path.open("rb", buffering=0) as file:
        if spans is None:
            gib = os.fstat(file.fileno()).st_size / 2**30
            logger.info("hashing all of a file of weights gib=%.1f path=%s", gib, path)
            return hashlib.file_digest(file, "sha256").digest()
        digest = hashlib.sha256()
        for start, end in _pages(spans):
            digest.update(os.pread(file.fileno(), end - start, start))
    return digest.digest()


def _pages(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges to hash, up to about eight per span."""
    for start, end in spans:
        step = max(_PAGE, (end - start) // _PAGES_PER_TENSOR)
        for offset in range(start, end, step):
            yield offset, min(offset + _PAGE, end)


def _tensor_spans(path: Path) -> list[tuple[int, int]] | None:
    """Return the byte ranges of a safetensors file's header and tensors, None with a gap."""
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


class UnknownAdapterError(Exception):
    """A LoRA adapter's weights cannot be identified, so its KV cannot be named."""


@dataclass(slots=True)
class _Answer:
    """The result for one request. The digest is None until the files were checked for it."""

    digest: bytes | None = None
    failed: bool = False


_Key = tuple[str, int, bool]
_Versions = list[tuple[str, int, int, int, int, int]]


class Adapters:
    """Content digests of LoRA adapters, computed once on a background thread: replicas that mount
    an adapter in different places share its KV, and new weights under an old name do not. For the
    scheduler's thread, which never touches the files. vLLM reads an adapter's files when it loads
    it, and again after it evicted it (``max_cpu_loras``), without informing connectors. If the
    files change, an engine may compute with either version. KV of such an adapter is no longer
    loaded or saved: each request checks once, with ``stat`` only. Source: vLLM 0.31-0.33,
    ``LRUCacheWorkerLoRAManager.add_adapter``."""

    def __init__(self, submit: Callable[[Callable[[], Steps[None]]], bool]) -> None:
        self._submit = submit
        self._adapters: dict[_Key, _Adapter] = {}
        self._answers: dict[str, _Answer] = {}
        self._paths: dict[int, str] = {}

    def digest(self, request_id: str, lora_request: Any) -> bytes | None:
        """Return the digest, or None while it is being computed. Raises ``UnknownAdapterError``."""
        answer = self._answers.get(request_id) or self._ask(request_id, lora_request)
        if answer is None:
            return None
        if answer.failed:
            raise UnknownAdapterError(lora_request.lora_path)
        return answer.digest

    def loaded(self, lora_request: Any) -> None:
        """Compute the digest now, because vLLM is about to load the adapter."""
        adapter = self._adapter(lora_request)
        if not adapter.asked:
            adapter.asked = self._submit(lambda: adapter.look(_Answer()))

    def unloaded(self, number: int) -> None:
        """Forget the adapter with that ``lora_int_id``, because vLLM has unloaded it."""
        self._paths.pop(number, None)
        self._adapters = {k: known for k, known in self._adapters.items() if k[1] != number}

    def ended(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._answers.pop(request_id, None)

    def forget(self) -> None:
        """Forget all adapters, because they may have changed in place."""
        # Replace the dictionaries, do not clear them: a read in progress may have the old files.
        self._adapters, self._answers, self._paths = {}, {}, {}

    def _ask(self, request_id: str, lora_request: Any) -> _Answer | None:
        if lora_request.load_inplace:
            # This engine's blocks may have been computed with other weights than the folder's.
            raise UnknownAdapterError(f"replaced in place: {lora_request.lora_path}")
        path = self._paths.setdefault(lora_request.lora_int_id, lora_request.lora_path)
        if path != lora_request.lora_path:
            # While vLLM has the adapter loaded, it identifies it by its number only.
            raise UnknownAdapterError(f"{lora_request.lora_path}: vLLM may still use {path}")
        adapter, answer = self._adapter(lora_request), _Answer()
        # The first request has it read. The others wait without occupying a thread each.
        if adapter.asked and not adapter.was_read:
            return None
        if not self._submit(lambda: adapter.look(answer)):
            return None
        adapter.asked = True
        self._answers[request_id] = answer
        return answer

    def _adapter(self, lora_request: Any) -> "_Adapter":
        three_d = bool(getattr(lora_request, "is_3d_lora_weight", False))
        key = (lora_request.lora_path, lora_request.lora_int_id, three_d)
        if key not in self._adapters:
            self._adapters[key] = _Adapter(key)
        return self._adapters[key]


class _Adapter:
    """One adapter. For one background thread, which may have begun several looks."""

    def __init__(self, key: _Key) -> None:
        self._key = key
        self._known: tuple[bytes, _Versions] | None = None
        """The digest, and the files it was computed from."""
        self._failed = False
        self.asked = False
        """Whether reading it has begun. For the scheduler's thread only."""

    @property
    def was_read(self) -> bool:
        """Whether checking it takes no longer than ``stat``."""
        return self._known is not None or self._failed

    def look(self, answer: _Answer) -> Steps[None]:
        """Fill in a request's answer: read the adapter, or check that it is unchanged."""
        digest = None
        try:
            if not self._failed:
                digest = yield from self._look()
        except OSError:
            pass
        finally:  # also after another exception, because requests wait for the answer
            self._failed = answer.failed = digest is None
            answer.digest = digest

    def _look(self) -> Steps[bytes | None]:
        path, _, three_d = self._key
        folder = local_folder(path, None, "adapter_config.json") or Path(path)
        files = adapter_files(folder)
        if self._known is None:
            before = _versions(files)
            text = yield from adapter_digest(files)
            if text is None:
                return None
            digest = bytes.fromhex(text)
            if three_d:  # the request determines the layout of the experts' weights
                digest = hashlib.sha256(digest + b"3d").digest()
            self._known = digest, before
        digest, before = self._known
        if before != _versions(files):
            logger.warning(
                "adapter changed in place, loading and saving nothing with it path=%s", path
            )
            return None
        return digest


def _versions(paths: Sequence[Path]) -> _Versions:
    """Identify versions of files by one ``stat`` each. Raises ``OSError``."""
    found = []
    for path in paths:
        stat = (real := path.resolve()).stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns  # a copy may preserve the first
        found.append((str(real), stat.st_size, *times, stat.st_ino, stat.st_dev))
    return found
