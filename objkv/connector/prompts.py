"""What besides token ids identifies a request's KV, read from vLLM's ``Request``."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from objkv.keys.prefix import MultimodalItem, PromptExtras

if TYPE_CHECKING:
    from vllm.v1.request import Request


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
