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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from objkv.background import Steps
from objkv.config import Config, cache_folder, make_private
from objkv.errors import ConfigError

logger = logging.getLogger(__name__)
_ENTRIES_MAX = 1024
"""Most cached entries, about 100 bytes each: enough for a thousand adapters. The oldest are deleted
first."""
_SETTLED_NS = 2_000_000_000
"""A file that changed this recently may change again without a new time stamp, because file systems
have a resolution of up to two seconds. ``git`` treats its index the same way."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identifies a file's version without reading it."""

    path: str
    """Absolute path with links resolved."""
    size: int
    mtime_ns: int
    ctime_ns: int
    """Changes even if a copy preserves ``mtime_ns``."""
    inode: int
    device: int


def identify(paths: Sequence[Path]) -> tuple[FileIdentity, ...]:
    """Return the identities of files in order, from one ``stat`` each. Raises ``OSError``."""
    found = []
    for path in paths:
        real = path.resolve()
        stat = real.stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns
        found.append(FileIdentity(str(real), stat.st_size, *times, stat.st_ino, stat.st_dev))
    return tuple(found)


class DigestCache:
    """A disk cache of digests of unchanged files. Safe for concurrent processes.

    An entry that is missing, damaged, owned by another user or made for other files is ignored and
    raises nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def remembered(self, kind: str, paths: Sequence[Path], compute: Callable[[], str]) -> str:
        """Return the cached digest of the files, or ``compute()`` and cache it.

        ``kind``: the kind of digest and its recipe. Raises the exceptions of ``compute`` and
        ``stat``. Files that change during the call or just before it are not cached.
        """
        files = identify(paths)
        if (known := self.known(kind, files)) is not None:
            return known
        digest = compute()
        if identify(paths) == files:
            self.remember(kind, files, digest)
        return digest

    def known(self, kind: str, files: Sequence[FileIdentity]) -> str | None:
        """Return the cached digest of the files."""
        entry = self._entry(kind, files)
        try:
            if entry.stat().st_uid != os.geteuid():
                return None
            content = entry.read_text("utf-8")
        except (OSError, ValueError):
            return None
        digest = content.partition(" ")[2]
        return digest if content == _content(entry, digest) else None

    def remember(self, kind: str, files: Sequence[FileIdentity], digest: str) -> None:
        """Cache the digest of files that have not changed, unless they changed just before."""
        if not _are_settled(files):
            return
        entry = self._entry(kind, files)
        try:
            make_private(self._folder)
            descriptor, partial = tempfile.mkstemp(dir=self._folder, suffix=".partial")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(_content(entry, digest))
                os.replace(partial, entry)
            except BaseException:
                Path(partial).unlink(missing_ok=True)
                raise
            self._prune()
        except OSError as exc:  # a full or read-only disk: the digest is computed again next time
            logger.info("digest not remembered path=%s reason=%s", entry, exc)

    def _entry(self, kind: str, files: Sequence[FileIdentity]) -> Path:
        """Return the entry of the files, whose name identifies them."""
        values = json.dumps([kind, [astuple(file) for file in files]])
        return self._folder / f"{hashlib.sha256(values.encode()).hexdigest()}.txt"

    def _prune(self) -> None:
        entries = list(self._folder.glob("*.txt"))
        if len(entries) <= _ENTRIES_MAX:
            return
        entries.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in entries[: len(entries) - _ENTRIES_MAX]:
            path.unlink(missing_ok=True)


def open_digests() -> DigestCache | None:
    """Return the digest cache that this user's replicas on this machine share. None for a user
    without a home."""
    try:
        return DigestCache(cache_folder() / "digests")
    except ConfigError:
        return None


def _content(entry: Path, digest: str) -> str:
    """Return the content of an undamaged entry."""
    return f"{hashlib.sha256(f'{entry.name} {digest}'.encode()).hexdigest()} {digest}"


def _are_settled(files: Sequence[FileIdentity]) -> bool:
    newest = max((max(file.mtime_ns, file.ctime_ns) for file in files), default=0)
    return time.time_ns() - newest > _SETTLED_NS


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


def weights_digest(
    folder: Path, *, full: bool = False, cache: DigestCache | None = None
) -> str | None:
    """Return the digest of configuration and weights in ``folder``, ``sampled:…`` or ``full:…``.
    None if ``folder`` has no weights. Raises ``OSError``."""
    weights = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not weights:
        return None
    configs = [path for name in _CONFIG_FILES if (path := folder / name).is_file()]
    kind = "full" if full else "sampled"

    def compute() -> str:
        digest = hashlib.sha256(_SCHEMES[full].encode())
        for path in configs:
            _add(digest, path.name.encode(), path.read_bytes())
        contents = _whole(weights) if full else _sampled(weights)
        for path, content in zip(weights, contents, strict=True):
            _add(digest, path.name.encode(), str(path.stat().st_size).encode(), content)
        return f"{kind}:{digest.hexdigest()[:40]}"

    if cache is None:
        return compute()
    return cache.remembered(_SCHEMES[full], [*configs, *weights], compute)


def read_weights(vllm_config: Any, config: Config) -> str:
    """Return the identity of the weights. Raises ``ConfigError`` if they cannot be identified.

    ``vllm_config``: of any version.
    """
    return _read_weights(vllm_config.model_config, vllm_config, config, "set --revision")


def read_draft_weights(vllm_config: Any, config: Config) -> str:
    """Return the identity of a draft's weights. Raises ``ConfigError`` if they cannot be
    identified."""
    model = vllm_config.speculative_config.draft_model_config
    return _read_weights(model, vllm_config, config, "set the draft's 'revision'")


def _read_weights(model: Any, vllm_config: Any, config: Config, fix: str) -> str:
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy:seed={model.seed}"
    return identify_weights(model.model, model.revision, config, fix)


def identify_weights(model: str, revision: str | None, config: Config, fix: str) -> str:
    """Return the digest of a model's weights, cached on this machine, or its revision if they
    cannot be read here. Raises ``ConfigError``, which names ``fix``, without either."""
    folder, full = local_folder(model, revision), config.weights_digest == "full"
    digest = None if folder is None else weights_digest(folder, full=full, cache=open_digests())
    if digest is not None:
        return digest
    if revision is not None:
        return f"revision:{revision}"
    raise ConfigError(
        f"objkv cannot identify the weights of {model!r}, because it cannot read them here: serve "
        f"from a local folder or {fix}"
    )


def adapter_files(folder: Path) -> list[Path]:
    """Return the files of a LoRA adapter in order. Raises ``OSError``."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (*_WEIGHT_SUFFIXES, ".json"))
    return [path for path in files if path.is_file()]


def adapter_digest(files: Sequence[Path]) -> Steps[bytes | None]:
    """Return the SHA-256 of a LoRA adapter's configuration and weights, or None without weights.
    In steps of a few milliseconds, so that others need not wait for all of it."""
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
    return digest.digest()


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
