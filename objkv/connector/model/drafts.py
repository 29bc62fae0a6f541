"""Draft models of speculative decoding: which layers are theirs, and what their KV depends on.

The layers of a draft share vLLM's groups and blocks with those of the target. objkv stores them in
groups of their own, so that replicas with and without the draft share the target's KV.

A block's hash covers the tokens of the block. The KV of a draft that continues the target's hidden
states (EAGLE, MTP and similar) also depends on the next token, so the last slot of a block is not
determined by its hash. objkv therefore stores the blocks of such a draft with the chunk that starts
one block later: each payload then depends only on tokens that its hash covers. vLLM leaves out the
last matched block for the same reason. Source: vLLM 0.31-0.33, ``use_eagle`` in
``config/speculative.py``, ``drop_eagle_block`` in ``v1/core/single_type_kv_cache_manager.py``.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from objkv.errors import ConfigError
from objkv.keys.identity import FIRST_DRAFT_GROUP, GroupIdentity, canonical_json

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods that keep no KV of their own."""
LIKE_EAGLE = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Methods that continue the target's hidden states."""
INSTEAD = "run it without the objkv connector, or"
_NUMBERS = 1 << 30
"""How many numbers there are for a draft's first group."""
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")
_OWN = re.compile(r"(?:^|\.)(?:draft_model|mtp[a-z_]*)\.")


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft with KV of its own, before its groups are known."""

    method: str
    tokens: int
    """Tokens that it proposes per step."""
    lags: bool
    """Whether its KV depends on the next token, so that its blocks are stored one block later."""
    target_layers: int
    heads: int
    """Its KV heads over all TP ranks."""
    latent: bool
    """Whether its layers keep latents (MLA), whatever the target's keep."""
    names: tuple[tuple[str, str], ...]
    """Weights and settings that determine its KV, sorted."""

    def has(self, layer: str) -> bool:
        """Whether a layer is the draft's, by its name: it follows the target's last layer, or its
        module has a name that only drafts have. A target has no such layer."""
        if _OWN.search(layer):
            return True
        found = _LAYER.search(layer)
        return found is not None and int(found[1]) >= self.target_layers

    def number(self, groups: Sequence[GroupIdentity]) -> int:
        """Return the number of its first group: a hash, so that different drafts of one target have
        different fields in the records that they share. Two with the same number would propose
        worse tokens, but the target decides on each."""
        shapes = [{k: v for k, v in asdict(group).items() if v is not None} for group in groups]
        # Everything that determines the draft's KV, other than the target's identity.
        document = {
            "method": self.method,
            "tokens": self.tokens,
            "names": [list(pair) for pair in self.names],
            "groups": shapes,
        }
        digest = hashlib.sha256(canonical_json(document)).digest()
        return FIRST_DRAFT_GROUP + int.from_bytes(digest[:8], "big") % _NUMBERS


def has_draft_kv(vllm_config: "VllmConfig") -> bool:
    """Whether the engine has a draft with KV. Raises ``ConfigError`` for unsupported methods."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in WITHOUT_KV:
        return False
    method = speculative.method
    if method != "draft_model" and method not in LIKE_EAGLE:
        raise ConfigError(
            f"objkv does not support speculative decoding with {method!r}: {INSTEAD} use one of "
            f"{', '.join(('draft_model', *LIKE_EAGLE, *WITHOUT_KV))}"
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            f"objkv does not support {method!r} together with pipeline parallelism, because only "
            f"the last stage has the draft: {INSTEAD} set pipeline_parallel_size to 1"
        )
    tp_size = speculative.draft_tensor_parallel_size or parallel.tensor_parallel_size
    if tp_size != parallel.tensor_parallel_size:
        raise ConfigError(
            f"objkv does not support a draft on {tp_size} of {parallel.tensor_parallel_size} "
            f"ranks: {INSTEAD} remove draft_tensor_parallel_size"
        )
    return True


def read_draft(vllm_config: "VllmConfig", weights: str) -> Draft:
    """Return the draft of an engine that has one. ``weights``: identity of the draft's weights."""
    speculative = vllm_config.speculative_config
    model = speculative.draft_model_config
    names = {
        "weights": weights,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "target_dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
    }
    return Draft(
        method=speculative.method,
        tokens=speculative.num_speculative_tokens,
        lags=speculative.method in LIKE_EAGLE,
        target_layers=int(vllm_config.model_config.get_total_num_hidden_layers()),
        heads=int(model.get_total_num_kv_heads()),
        latent=bool(model.use_mla),
        names=tuple(sorted(names.items())),
    )
