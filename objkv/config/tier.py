"""Settings of a secondary tier: an entry of ``secondary_tiers`` in vLLM's configuration."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from objkv.config.sources import Resolved, resolve_config
from objkv.errors import ConfigError


class TierOptions(BaseModel):
    """Settings of a tier, in addition to those of ``Config``."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    settings: dict[str, str] = Field(default_factory=dict)
    """Names and values in the identity that the operator vouches for, such as ``adapters``."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Locality in KV events. Requests may select tiers by it."""
    enable_kv_events: bool = False
    """Whether saved and missing chunks become KV events, if vLLM has them enabled."""


def read_options(options: Mapping[str, Any]) -> tuple[TierOptions, Resolved]:
    """Read a tier's settings from its entry in ``secondary_tiers`` and all other sources. Objects
    that only vLLM can have added are ignored. Raises ``ConfigError``, which names the key."""
    plain = {
        name: value
        for name, value in options.items()
        if value is None or isinstance(value, (str, int, float, list, tuple, Mapping))
    }
    ours = {name: plain.pop(name) for name in TierOptions.model_fields if name in plain}
    try:
        own = TierOptions.model_validate(ours)
    except ValidationError as exc:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors()]
        raise ConfigError("objkv's secondary tier: " + "; ".join(lines)) from exc
    return own, resolve_config(plain, origin="secondary_tiers")
