"""What besides token ids identifies a request's KV, read from vLLM's ``Request``."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from objkv.connector.weights import adapter_digest, local_folder
from objkv.keys.prefix import MultimodalItem, PromptExtras

if TYPE_CHECKING:
    from vllm.v1.request import Request


class UnknownAdapterError(Exception):
    """A LoRA adapter whose weights cannot be read here: its KV cannot be told from others'."""


class Adapters:
    """Content digests of LoRA adapters, computed on a background thread, once per adapter.

    The digest is of what the adapter holds, not of its name or mount path: replicas that mount one
    adapter in different places share, and other weights under an old name do not.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], bool]) -> None:
        self._submit = submit
        self._digests: dict[tuple[str, int], bytes | None] = {}
        self._asked: set[tuple[str, int]] = set()

    def digest(self, lora_request: Any) -> bytes | None:
        """The digest, or None while it is not known yet. Raises ``UnknownAdapterError``."""
        if lora_request.load_inplace:
            # The folder may hold other weights than the blocks of this engine were computed with.
            raise UnknownAdapterError(f"replaced in place: {lora_request.lora_path}")
        key = (lora_request.lora_path, lora_request.lora_int_id)
        if key in self._digests:
            digest = self._digests[key]
            if digest is None:
                raise UnknownAdapterError(lora_request.lora_path)
            return digest
        digests = self._digests
        if key not in self._asked and self._submit(lambda: _read(key, digests)):
            self._asked.add(key)
        return None

    def forget(self) -> None:
        """Adapters may have changed in place: read them again."""
        # Others, not these emptied: what is being read now may be what was there before.
        self._digests, self._asked = {}, set()


def _read(key: tuple[str, int], digests: dict[tuple[str, int], bytes | None]) -> None:
    digest = None
    try:
        digest = adapter_digest(local_folder(key[0], None) or Path(key[0]))
    except OSError:
        pass
    finally:  # whatever was raised: requests of an adapter without an answer wait, each of them
        digests[key] = digest


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What a request's prompt consists of besides tokens, as it was when the request arrived.

    Taken at once and read on another thread: whatever becomes of the request meanwhile, its hashes
    name the prompt that it came with.
    """

    salt: str | None
    features: tuple[Any, ...]
    embeds: torch.Tensor | None
    """``[tokens, hidden]`` on the CPU; vLLM's own, read and never changed."""
    is_token_ids: Sequence[bool] | None

    @classmethod
    def of(cls, request: "Request") -> "PromptParts":
        """Those of a request; takes references only."""
        embeds = request.prompt_embeds
        mask = None if embeds is None else request.prompt_is_token_ids
        return cls(request.cache_salt, tuple(request.mm_features), embeds, mask)

    def extras(self, lora_digest: bytes | None, chunk_tokens: int) -> PromptExtras:
        """What identifies the prompt's KV besides token ids. May take long: hashes embeddings."""
        return PromptExtras(
            lora_digest=lora_digest,
            salt=self.salt,
            items=tuple(
                MultimodalItem(
                    feature.identifier.encode(),
                    feature.mm_position.offset,
                    feature.mm_position.length,
                )
                for feature in self.features
            ),
            embeds=self._digests(chunk_tokens),
        )

    def _digests(self, chunk_tokens: int) -> dict[int, bytes]:
        """Per chunk of a prompt given by embeddings: SHA-256 of its rows, and of which count."""
        if self.embeds is None:
            return {}
        digests = {}
        for chunk, start in enumerate(range(0, self.embeds.shape[0], chunk_tokens)):
            rows = self.embeds[start : start + chunk_tokens].contiguous()
            digest = hashlib.sha256(f"{rows.dtype}{tuple(rows.shape)}".encode())
            digest.update(rows.view(torch.uint8).numpy().data)
            if self.is_token_ids is not None:
                digest.update(bytes(self.is_token_ids[start : start + chunk_tokens]))
            digests[chunk] = digest.digest()
        return digests
