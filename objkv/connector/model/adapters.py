"""Identifies a request's LoRA adapter by the content of its files, while they are unchanged.

vLLM reads an adapter's files when it loads the adapter, and again after it evicted it to make room
(``max_cpu_loras``), without informing connectors. If the files change under the same name, an
engine may compute with either version. KV of such an adapter is no longer loaded or saved.
Source: vLLM 0.31-0.33, ``LRUCacheWorkerLoRAManager.add_adapter`` in ``lora/worker_manager.py``.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objkv.background import Steps
from objkv.connector.model.weights import adapter_digest, adapter_files, local_folder

logger = logging.getLogger(__name__)


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
    """Content digests of LoRA adapters, computed once per adapter on a background thread.

    Each request checks once, with ``stat`` only, that the files are unchanged. The digest covers
    the adapter's content, not its name or path: replicas that mount an adapter in different places
    share its KV, and new weights under an old name do not. The scheduler's thread calls all
    methods, and never touches the files itself.
    """

    def __init__(self, submit: Callable[[Callable[[], Steps[None]]], bool]) -> None:
        self._submit = submit
        self._adapters: dict[_Key, _Adapter] = {}
        self._answers: dict[str, _Answer] = {}
        self._paths: dict[int, str] = {}

    def digest(self, request_id: str, lora_request: Any) -> bytes | None:
        """Return the digest, or None while it is being computed. Raises ``UnknownAdapterError``."""
        answer = self._answers.get(request_id)
        if answer is None:
            answer = self._ask(request_id, lora_request)
        if answer is not None and answer.failed:
            raise UnknownAdapterError(lora_request.lora_path)
        return None if answer is None else answer.digest

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
    """One adapter of this engine. For one background thread, which may have begun several looks."""

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
    """Identify versions of files without reading them, from one ``stat`` each. Raises
    ``OSError``."""
    found = []
    for path in paths:
        stat = (real := path.resolve()).stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns  # a copy may preserve the first
        found.append((str(real), stat.st_size, *times, stat.st_ino, stat.st_dev))
    return found
