"""Names of hand-offs. They have separate namespaces and hashes, so they never collide with chunks.

A hand-off is a whole prompt of any length, with its KV and its hidden states:

    root = SHA-256(field("objkv-handoff-1") field(namespace))[:20]
    hash = SHA-256(field(root) field(tokens) field(""))[:20]

with ``field`` and the encoding of tokens as in ``keys/prefix.py``. The identity's page layout is
``handoff-1``, which chunks never have.
"""

import hashlib
import json
from collections.abc import Sequence

from objkv.codec.payload import Claim
from objkv.config import Config
from objkv.connector.handoff.batch import HandoffConfig, ModelConfig
from objkv.connector.model.weights import local_folder, model_digest
from objkv.errors import ConfigError
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import GroupIdentity, Identity, name_model, sealed_extra
from objkv.keys.prefix import PREFIX_HASH_BYTES, encode_tokens, next_hash
from objkv.keys.topology import Shard

SCHEME = "objkv-handoff-1"
PAGE_LAYOUT = "handoff-1"


def read_handoff_identity(config: HandoffConfig, settings: Config) -> Identity:
    """Return the identity document of this model's hand-offs, which is equal on every rank and on
    every engine that may receive them.

    Reads the model's files, which may take seconds. Raises ``ConfigError``, which names the fix.
    """
    model = config.model_config
    if getattr(config.cache_config, "calculate_kv_scales", False):  # not every version has it
        raise ConfigError(
            "objkv cannot hand over KV if each engine calculates its own scales: turn "
            "calculate_kv_scales off"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(config.cache_config.cache_dtype)
    size = model.get_head_size()
    # Each token is a block: K and V are fused as in chunks, and prompts may have any length.
    group = GroupIdentity(
        kind="full",
        window=None,
        layers=tuple(layer_name(i) for i in range(int(model.hf_text_config.num_hidden_layers))),
        heads=1 if model.use_mla else int(model.get_total_num_kv_heads()),
        content=size if model.use_mla else 2 * size,
        block_size=1,
    )
    extra = {
        "dtype": dtype,
        "hf_config": _config_digest(model),
        "hidden": str(model.get_hidden_size()),
        "scheme": SCHEME,
    }
    return Identity(
        model=name_model(model.model, settings.model_id),
        weights=_weights(config, settings),
        quantization=model.quantization,
        kv_dtype=dtype if cache_dtype == "auto" else cache_dtype,
        groups=(group,),
        page_layout=PAGE_LAYOUT,
        chunk_tokens=1,
        weights_epoch=settings.weights_epoch,
        tenant=settings.tenant,
        extra=sealed_extra(tuple(sorted(extra.items())), settings.seals),
    )


def layer_name(layer: int) -> str:
    """Return the name of a layer's KV in a payload. Layers count over all pipeline stages."""
    return f"layers.{layer}"


def handoff_claim(namespace: str, tokens: Sequence[int], shard: Shard) -> Claim:
    """Return the claim of one rank's hand-off of the prompt ``tokens``.

    Raises OverflowError for a token id outside ``[0, 2**32)``.
    """
    root = handoff_root(namespace)
    digest = next_hash(root, encode_tokens(tokens))
    return Claim(ChunkKey(namespace, digest, 0, shard), root, 0, len(tokens))


def handoff_root(namespace: str) -> bytes:
    """Return the parent hash of every hand-off of a namespace, 20 bytes."""
    digest = hashlib.sha256()
    for value in (SCHEME.encode(), namespace.encode("ascii")):
        digest.update(len(value).to_bytes(8, "little") + value)
    return digest.digest()[:PREFIX_HASH_BYTES]


def _weights(config: HandoffConfig, settings: Config) -> str:
    model = config.model_config
    if str(getattr(config.load_config.load_format, "value", config.load_config.load_format)) == (
        "dummy"
    ):
        return f"dummy:seed={model.seed}"
    folder = local_folder(model.model, model.revision)
    digest = None if folder is None else model_digest(folder, settings)
    if digest is not None:
        return digest
    if model.revision is None:
        raise ConfigError(
            f"objkv cannot identify the weights of {model.model!r}, because it cannot read them "
            "here: serve from a local folder or set --revision"
        )
    return f"revision:{model.revision}"


def _config_digest(model: ModelConfig) -> str:
    """Return the digest of the model's configuration after overrides, for example of rope."""
    values = dict(model.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    if '"longrope"' in text or '"su"' in text:
        # The engine's maximum length selects the factors that rotate all keys, also for short
        # prompts.
        text += f" max_model_len={model.max_model_len}"
    return hashlib.sha256(text.encode()).hexdigest()[:40]
