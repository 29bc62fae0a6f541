"""Limits of a request's transfers, set by its sender: tokens, tiers, and hints of an orchestrator.

The names and meanings are those of vLLM's own ``OffloadingConnector``, so a router can send the
same parameters whatever stores the KV. Values of another type are ignored. Source: vLLM 0.33,
``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` and ``v1/kv_hints``.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
Locality = Literal["LOCAL", "REMOTE"]
_MEDIUM = "STORAGE"
_MEDIA, _LOCALITIES = ("CPU", _MEDIUM), ("LOCAL", "REMOTE")
_LOADS, _SAVES, _TIERS = "max_load_tokens", "max_offload_tokens", "kv_load_tiers"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request."""

    load_tokens_max: int | None = None
    """Most tokens to load beyond those that vLLM has. None: any number."""
    save_tokens_max: int | None = None
    """Most leading tokens to save. None: all."""
    loads: bool = True
    """Whether the shared store is among the tiers to load from."""


NO_LIMITS = RequestLimits()


class LimitReader:
    """Reads the limits of requests. For the scheduler's thread only. Never raises."""

    def __init__(self, locality: Locality, recorder: Recorder) -> None:
        """``locality``: of the bulk store, as seen from this replica."""
        self._locality = locality
        self._recorder = recorder
        self._logged = set[str]()

    def read(self, request: "Request") -> RequestLimits:
        """Return the limits of a request."""
        if hints := getattr(request, "kv_hints", None):
            self._count_hints(hints)
        params = getattr(request, "kv_transfer_params", None)
        if not isinstance(params, Mapping) or not {_LOADS, _SAVES, _TIERS} & params.keys():
            return NO_LIMITS
        return RequestLimits(
            self._number(params, _LOADS), self._number(params, _SAVES), self._allows(params)
        )

    def _number(self, params: Mapping[str, Any], name: str) -> int | None:
        value = params.get(name)
        if value is None or (type(value) is int and value >= 0):
            return value
        self._ignore(name, "not a non-negative integer")
        return None

    def _allows(self, params: Mapping[str, Any]) -> bool:
        """Whether any listed tier is the shared store. No valid entry of some means any tier."""
        listed = params.get(_TIERS)
        if listed is None:
            return True
        if not isinstance(listed, list):
            self._ignore(_TIERS, "not a list")
            return True
        known = [entry for entry in listed if self._is_tier(entry)]
        mine = {"medium": _MEDIUM, "locality": self._locality}
        return (bool(listed) and not known) or any(
            all(entry.get(name) is None or entry[name].upper() == mine[name] for name in mine)
            for entry in known
        )

    def _is_tier(self, entry: Any) -> bool:
        allowed = {"medium": _MEDIA, "locality": _LOCALITIES}
        if isinstance(entry, dict) and all(
            (value := entry.get(name)) is None
            or (isinstance(value, str) and value.upper() in values)
            for name, values in allowed.items()
        ):
            return True
        self._ignore(_TIERS, "an entry is not a known medium and locality")
        return False

    def _count_hints(self, hints: Any) -> None:
        """Count the actions of a ``KvHintsEnvelope``. None needs anything: the lookup of a prompt
        starts when its request arrives, and objkv has no place for KV without a request."""
        actions = getattr(hints, "actions", None)
        if isinstance(actions, list | tuple) and actions:
            self._recorder.count("hints_unused", len(actions))

    def _ignore(self, name: str, reason: str) -> None:
        self._recorder.count("limits_ignored")
        if name not in self._logged:
            self._logged.add(name)
            logger.warning("transfer parameter ignored name=%s reason=%s", name, reason)
