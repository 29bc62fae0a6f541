"""Which LoRA adapter a request uses: by what its files hold, and only while they still hold it.

vLLM reads an adapter's files when it loads it, and again, without informing connectors, when it had
put it aside to make room (``max_cpu_loras``). So files that changed beneath a name leave it open
which of the two an engine computes with: such an adapter is neither loaded nor saved from then on.
Source: vLLM 0.31-0.33, ``LRUCacheWorkerLoRAManager.add_adapter`` in ``lora/worker_manager.py``.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from objkv.connector.model.weights import (
    DigestCache,
    FileIdentity,
    adapter_digest,
    adapter_files,
    identify,
    local_folder,
)

logger = logging.getLogger(__name__)

_KIND = "objkv-adapter-1"


class UnknownAdapterError(Exception):
    """A LoRA adapter whose weights are not known: its KV could be that of others."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of an adapter."""

    digest: bytes
    files: tuple[FileIdentity, ...]


@dataclass(slots=True)
class _Answer:
    """Of one request; None until the files were looked at for it."""

    digest: bytes | None = None
    failed: bool = False


_Key = tuple[str, int, bool]


class Adapters:
    """Content digests of LoRA adapters, read on background threads, once per adapter; each request
    looks once, by ``stat`` alone, whether the files are still the same.

    The digest is of what the adapter holds, not of its name or mount path: replicas that mount one
    adapter in different places share, and other weights under an old name do not. All methods are
    called by the scheduler's thread, which never touches the files.
    """

    def __init__(
        self, submit: Callable[[Callable[[], None]], bool], cache: DigestCache | None = None
    ) -> None:
        self._submit = submit
        self._cache = cache
        self._adapters: dict[_Key, _Adapter] = {}
        self._answers: dict[str, _Answer] = {}
        self._paths: dict[int, str] = {}

    def digest(self, request_id: str, lora_request: Any) -> bytes | None:
        """The digest, or None while it is not known yet. Raises ``UnknownAdapterError``."""
        answer = self._answers.get(request_id)
        if answer is None:
            answer = self._ask(request_id, lora_request)
        if answer is not None and answer.failed:
            raise UnknownAdapterError(lora_request.lora_path)
        return None if answer is None else answer.digest

    def loaded(self, lora_request: Any) -> None:
        """vLLM is about to load it: read it now, not when its first request comes."""
        adapter = self._adapter(lora_request)
        if not adapter.asked:
            adapter.asked = self._submit(lambda: adapter.look(_Answer()))

    def unloaded(self, number: int) -> None:
        """vLLM has put the adapter of that ``lora_int_id`` away: what comes next is read anew."""
        self._paths.pop(number, None)
        self._adapters = {k: known for k, known in self._adapters.items() if k[1] != number}

    def ended(self, request_id: str) -> None:
        """The request ended."""
        self._answers.pop(request_id, None)

    def forget(self) -> None:
        """Adapters may have changed in place: read them again."""
        # Others, not these emptied: what is being read now may be what was there before.
        self._adapters, self._answers, self._paths = {}, {}, {}

    def _ask(self, request_id: str, lora_request: Any) -> _Answer | None:
        if lora_request.load_inplace:
            # The folder may hold other weights than the blocks of this engine were computed with.
            raise UnknownAdapterError(f"replaced in place: {lora_request.lora_path}")
        path = self._paths.setdefault(lora_request.lora_int_id, lora_request.lora_path)
        if path != lora_request.lora_path:
            # vLLM goes by the number alone while it has that adapter loaded.
            raise UnknownAdapterError(f"{lora_request.lora_path}: vLLM may still use {path}")
        adapter, answer = self._adapter(lora_request), _Answer()
        # One request has it read, and the others wait for that without keeping a thread each.
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
            self._adapters[key] = _Adapter(key, self._cache)
        return self._adapters[key]


class _Adapter:
    """One adapter of this engine. Used by background threads."""

    def __init__(self, key: _Key, cache: DigestCache | None) -> None:
        self._key = key
        self._cache = cache
        self._lock = Lock()
        self._known: _Known | None = None
        self._failed = False
        self.asked = False
        """Whether it is being read, or was. The scheduler's thread only."""

    @property
    def was_read(self) -> bool:
        """Whether looking at it takes no longer than ``stat``."""
        return self._known is not None or self._failed

    def look(self, answer: _Answer) -> None:
        """Answer a request: read the adapter, or if it was read see whether it is the same."""
        digest = None
        try:
            digest = self._current()
        finally:  # whatever was raised: requests without an answer wait
            answer.failed = digest is None
            answer.digest = digest

    def _current(self) -> bytes | None:
        with self._lock:
            if self._failed:
                return None
            try:
                digest = self._look()
            except BaseException:
                self._failed = True
                raise
            self._failed = digest is None
            return digest

    def _look(self) -> bytes | None:
        try:
            files = _folder(self._key[0])
            now = identify(files)
            if self._known is None:
                self._known = self._read(files, now)
        except OSError:
            return None
        if self._known is None:
            return None
        if self._known.files != now:
            logger.warning(
                "adapter changed in place, neither loading nor saving with it path=%s",
                self._key[0],
            )
            return None
        return self._known.digest

    def _read(self, files: list[Path], before: tuple[FileIdentity, ...]) -> _Known | None:
        def compute() -> str:
            digest = adapter_digest(files)
            return "" if digest is None else digest.hex()

        cache = self._cache
        text = compute() if cache is None else cache.remembered(_KIND, files, compute)
        if not text or identify(files) != before:
            return None
        digest = bytes.fromhex(text)
        if self._key[2]:  # the request says how the weights of experts are laid out in the files
            digest = hashlib.sha256(digest + b"3d").digest()
        return _Known(digest, before)


def _folder(path: str) -> list[Path]:
    folder = local_folder(path, None, "adapter_config.json") or Path(path)
    return adapter_files(folder)
