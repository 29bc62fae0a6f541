"""Limits of a request's transfers, set by its sender, and hints of an orchestrator.

The names and meanings are those of vLLM's own ``OffloadingConnector``, so a router can send the
same parameters whatever stores the KV. Values of another type are ignored. Source: vLLM 0.33,
``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py`` and ``v1/kv_hints``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any, Final, Literal

from objkv.agent.http.prompts import read_hashes, read_order
from objkv.agent.messages import PrefetchOrder
from objkv.background import Steps, in_steps
from objkv.cache.lookup import Hashes
from objkv.errors import ConfigError
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
Locality = Literal["LOCAL", "REMOTE"]
_MEDIUM = "STORAGE"
_MEDIA, _LOCALITIES = ("CPU", _MEDIUM), ("LOCAL", "REMOTE")
_LOADS, _SAVES, _TIERS = "max_load_tokens", "max_offload_tokens", "kv_load_tiers"
PUTS: Final = "objkv_put"
"""objkv's own: the agent is not to hold the request's payloads back."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request."""

    load_tokens_max: int | None = None
    """Most tokens to load beyond those that vLLM has. None: any number."""
    save_tokens_max: int | None = None
    """Most leading tokens to save. None: all."""
    loads: bool = True
    """Whether the shared store is among the tiers to load from."""
    puts: bool = False
    """Whether a node's agent puts what is saved at once, and what it holds back already."""


NO_LIMITS = RequestLimits()
Prefetch = Callable[[str, Sequence[bytes], PrefetchOrder], Steps[int] | int]
"""Namespace, prefix hashes and order. Raises ``StoreError``."""
PREFETCH_ACTION: Final = ("objkv.prefetch", "1")
_PAYLOAD = frozenset(
    {"tokens", "hashes", "cache_salt", "lora_digest", "deadline_ms", "priority", "bytes_max"}
)
_ACTIONS_MAX, _HINTS_AT_ONCE, _REASONS_MAX = 8, 2, 16
"""Actions to read of a request; prefetches at once, which leaves threads for lookups; and reasons
that are logged."""


class LimitReader:
    """Reads the limits of requests. For the scheduler's thread only. Never raises."""

    def __init__(self, locality: Locality, recorder: Recorder) -> None:
        """``locality``: of the bulk store, as seen from this replica."""
        self._locality = locality
        self._recorder = recorder
        self._logged = set[str]()

    def read(self, request: "Request") -> RequestLimits:
        """Return the limits of a request."""
        params = getattr(request, "kv_transfer_params", None)
        if params is None or not isinstance(params, Mapping):  # usually None, which is quick
            return NO_LIMITS
        if not {_LOADS, _SAVES, _TIERS, PUTS} & params.keys():
            return NO_LIMITS
        return RequestLimits(
            self._valid(params, _LOADS, int, "not a non-negative integer"),
            self._valid(params, _SAVES, int, "not a non-negative integer"),
            self._allows(params),
            self._valid(params, PUTS, bool, "neither true nor false") is True,
        )

    def _valid(self, params: Mapping[str, Any], name: str, kind: type, reason: str) -> Any:
        """Return the value of a parameter, None if it has none that is valid."""
        value = params.get(name)
        of_kind = type(value) is kind  # not by isinstance: a bool is an int
        if value is None or (of_kind and (kind is not int or value >= 0)):
            return value
        self._ignore(name, reason)
        return None

    def _allows(self, params: Mapping[str, Any]) -> bool:
        """Whether any listed tier is the shared store. No valid entry of some means any tier."""
        listed = self._valid(params, _TIERS, list, "not a list")
        if listed is None:
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

    def _ignore(self, name: str, reason: str) -> None:
        self._recorder.count("limits_ignored")
        if name not in self._logged:
            self._logged.add(name)
            logger.warning("transfer parameter ignored name=%s reason=%s", name, reason)


class HintReader:
    """Has the node's agent prefetch what hints name. For the scheduler's thread, which it never
    delays: hints are read on other threads. Never raises.

    vLLM's envelope carries actions and defines none (``v1/kv_hints``, 0.32). objkv acts on its own,
    ``objkv.prefetch`` version 1: the payload is a prompt as in ``POST /v1/prefetch`` of the agent,
    in this replica's namespace; without tokens and hashes it is the request's own prompt.
    """

    def __init__(
        self,
        prefetch: Prefetch,
        submit: Callable[[Callable[[], Steps[None]]], bool],
        chunk_tokens: int,
        recorder: Recorder,
    ) -> None:
        """``submit``: runs a job on another thread, or returns False."""
        self._prefetch, self._submit = prefetch, submit
        self._chunk_tokens, self._recorder = chunk_tokens, recorder
        self._slots = BoundedSemaphore(_HINTS_AT_ONCE)
        self._logged = set[str]()

    def act(self, request: "Request", namespace: str, own: Hashes | None) -> None:
        """Start the prefetches of a request's hints. ``own``: the hashes of its own prompt, which
        are computed when they are read; None if it may not load."""
        actions = getattr(getattr(request, "kv_hints", None), "actions", None)
        if not isinstance(actions, list | tuple) or not actions:
            return
        jobs = [
            partial(self._run, action.payload, namespace, own)
            for action in actions[:_ACTIONS_MAX]
            if (getattr(action, "action_type", None), getattr(action, "action_version", None))
            == PREFETCH_ACTION
        ]
        started = sum(self._start(job) for job in jobs)
        if unused := len(actions) - started:
            self._recorder.count("hints_unused", unused)

    def _start(self, job: Callable[[], Steps[None]]) -> bool:
        if not self._slots.acquire(blocking=False):
            return False
        if not self._submit(job):
            self._slots.release()
            return False
        return True

    def _run(self, payload: Any, namespace: str, own: Hashes | None) -> Steps[None]:
        name = "hints_unused"
        try:
            hashes = self._hashes(payload, namespace, own)
            if hashes:
                yield from in_steps(self._prefetch(namespace, hashes, read_order(payload)))
                name = "hints_prefetched"
        except ConfigError as exc:
            if (reason := str(exc)) not in self._logged and len(self._logged) < _REASONS_MAX:
                self._logged.add(reason)
                logger.warning("hint ignored type=%s reason=%s", PREFETCH_ACTION[0], reason)
        finally:
            self._slots.release()
            self._recorder.count(name)

    def _hashes(self, payload: Any, namespace: str, own: Hashes | None) -> Sequence[bytes]:
        if not isinstance(payload, Mapping):
            raise ConfigError("the payload is not an object")
        if unknown := sorted(map(str, payload.keys() - _PAYLOAD)):
            raise ConfigError(f"{unknown[0][:100]!r} is unknown")
        if {"tokens", "hashes"} & payload.keys():
            return read_hashes(payload, namespace, lambda: self._chunk_tokens)
        return () if own is None else own[:]
