"""Checks what vLLM receives as ``--kv-transfer-config``: connectors and tiers of objkv in it.

Needs no vLLM. Only objkv's own entries and what vLLM needs to find them are checked.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from objkv.config import Resolved, resolve_config
from objkv.config.tier import read_options
from objkv.errors import ConfigError
from objkv.ops.doctor.probes import Check

CONNECTORS: Final = {"ObjKVConnector": "objkv.connector"}
TIER: Final = "ObjKVTier"
_TIER_MODULE: Final = "objkv.connector.tier"
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_OF_VLLM: Final = ("type", "module_path", "backpressure")
"""Keys of a tier's entry that vLLM reads itself."""
_SMALL: Final = Check(
    "engine",
    TIER,
    "warning",
    "chunks of one block make small payloads, which are slow with every object store",
    "set block_size or blocks_per_chunk in kv_connector_extra_config, such as 256 tokens",
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The entries of objkv in vLLM's configuration."""

    resolved: Resolved
    """Settings of the first entry."""
    checks: tuple[Check, ...]
    """One for each entry and each problem."""


def read_transfer(text: str, *, file: Path | None = None) -> Transfer:
    """Read ``text``, which is JSON or the name of a file with it, and check its entries.

    ``file`` replaces ``OBJKV_CONFIG_FILE``. Raises ``ConfigError`` if nothing in it is objkv's or
    vLLM or objkv would refuse it at start.
    """
    found: list[Resolved] = []
    checks: list[Check] = []
    try:
        entries = list(_entries(_parse(text)))
    except (AttributeError, TypeError) as exc:
        raise ConfigError(
            f"kv-transfer-config does not have the form that vLLM reads: {exc}"
        ) from exc
    for name, entry, outer in entries:
        if name == TIER:
            checks += _check_tier(outer)
            values = {key: value for key, value in entry.items() if key not in _OF_VLLM}
            resolved = read_options(values, file=file)[1]
        else:
            extra = entry.get("kv_connector_extra_config") or {}
            resolved = resolve_config(extra, file=file, origin="kv_connector_extra_config")
        found.append(resolved)
        checks.append(Check("engine", name, "ok", "its settings are valid"))
    if not found:
        raise ConfigError(f"kv-transfer-config has no {' or '.join((*CONNECTORS, TIER))}")
    if any(other.config != found[0].config for other in found[1:]):
        detail = "only the store and the index of the first entry are probed"
        checks.append(Check("engine", "entries", "warning", detail, "check each entry alone too"))
    return Transfer(found[0], tuple(checks))


def _parse(text: str) -> Mapping[str, Any]:
    try:
        given = (
            text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8-sig")
        )
        parsed = json.loads(given)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"kv-transfer-config is neither JSON nor a file with it: {exc}") from exc
    if not isinstance(parsed, dict):
        raise ConfigError("kv-transfer-config must be a JSON object")
    return parsed


def _entries(
    connector: Mapping[str, Any],
) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield the name and the entry of each connector and tier of objkv, and its connector."""
    name, extra = connector.get("kv_connector"), connector.get("kv_connector_extra_config") or {}
    if connector.get("kv_role") not in _ROLES:
        raise ConfigError(f"kv_role of {name} must be one of {', '.join(_ROLES)}")
    for inner in extra.get("connectors", ()):
        yield from _entries(inner)
    if name in CONNECTORS:
        _find(str(name), connector.get("kv_connector_module_path"), CONNECTORS[name], needed=False)
        yield str(name), connector, connector
    for tier in extra.get("secondary_tiers", ()):
        if tier.get("type") == TIER:
            _find(TIER, tier.get("module_path"), _TIER_MODULE, needed=True)
            yield TIER, tier, connector


def _find(name: str, module: str | None, expected: str, *, needed: bool) -> None:
    """Raise ``ConfigError`` if vLLM would not find the class. A plugin registers connectors."""
    if module != expected and (needed or module is not None):
        key = "module_path" if needed else "kv_connector_module_path"
        raise ConfigError(f"set {key} of {name} to {expected!r}, not {module!r}")


def _check_tier(connector: Mapping[str, Any]) -> Iterator[Check]:
    extra = connector.get("kv_connector_extra_config") or {}
    if connector.get("kv_connector") != "OffloadingConnector":
        raise ConfigError(f"{TIER} needs kv_connector 'OffloadingConnector'")
    if extra.get("spec_name") != "TieringOffloadingSpec":
        raise ConfigError(f"{TIER} needs spec_name 'TieringOffloadingSpec' in the extra config")
    if not extra.get("cpu_bytes_to_use"):
        raise ConfigError(f"{TIER} needs cpu_bytes_to_use in the extra config: vLLM's CPU memory")
    if not extra.get("block_size") and not extra.get("blocks_per_chunk"):
        yield _SMALL
