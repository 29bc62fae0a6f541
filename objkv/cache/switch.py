"""An operator's switch that decides about loads before every replica's own settings.

One small document in the bulk store holds it, so that it works with any index and with replicas'
rights. Each replica reads it in the background while it has requests, which never wait for it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import gmtime, strftime, time
from typing import Annotated, Final, Literal, Protocol, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from objkv.background import Steps, in_steps
from objkv.cache.admission import Mode
from objkv.errors import ConfigError, PayloadError, StoreError
from objkv.stores.base import ReadStore, WriteStore
from objkv.telemetry import Recorder

logger = logging.getLogger(__name__)

OPERATOR_FOLDER: Final = "operator"
"""Folder of the bulk store for documents by which operators direct all replicas."""
SWITCH_PATH: Final = f"{OPERATOR_FOLDER}/admission.json"
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
_DOCUMENT_BYTES_MAX: Final = 512 << 10
"""Fits ``_SWITCHES_MAX`` orders of the longest texts."""
_SWITCHES_MAX: Final = 200
AUTHOR_CHARS_MAX: Final = 200
_INTERVAL_S: Final = 20.0
_STRICT: Final = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, slots=True, config=_STRICT)
class Switch:
    """One order of an operator. Raises ``ValueError`` if a value is out of bounds."""

    mode: Mode
    namespace: str | None
    """The only namespace that it is for; None for the whole fleet."""
    until_s: int
    """Seconds since the epoch, by the operator's clock. Replicas ignore it from then on."""
    created_s: int
    by: str
    """Who gave it, by their own statement."""

    def __post_init__(self) -> None:
        is_scoped = self.namespace is None or 0 < len(self.namespace) <= 200
        if not (is_scoped and 0 < self.until_s < 1 << 40 and len(self.by) <= AUTHOR_CHARS_MAX):
            raise ValueError("an order's values are out of bounds")

    def scope(self) -> str:
        return "all replicas" if self.namespace is None else f"replicas of {self.namespace[:8]}"

    def end(self) -> str:
        """Return the command that ends it."""
        of = "" if self.namespace is None else f" -n {self.namespace[:8]}"
        return f"objkv admission clear{of}"

    def describe(self) -> str:
        """Return the order in words, without its namespace."""
        until = strftime("%Y-%m-%d %H:%M UTC", gmtime(self.until_s))
        return f"admission is {self.mode} until {until}, by {self.by}"


@dataclass(frozen=True, slots=True, config=_STRICT)
class _Document:
    format: Literal[1]
    switches: Annotated[tuple[Switch, ...], Field(max_length=_SWITCHES_MAX)]


_DOCUMENT: Final = TypeAdapter(_Document)


def read_switches(bulk: ReadStore) -> tuple[Switch, ...]:
    """Return all orders, also ended ones; none without a document. Raises ``StoreError``, and
    ``PayloadError`` if objkv did not write the document."""
    return _parse(bulk.get(SWITCH_PATH, 0, _DOCUMENT_BYTES_MAX))


def set_switch(bulk: WriteStore, switch: Switch) -> None:
    """Give an order, in place of an earlier one for the same namespace or for the fleet. Of two at
    once the later wins. Raises ``StoreError``, and ``ConfigError`` for too many."""
    _write(bulk, [switch, *_others(bulk, switch.namespace, switch.created_s)])


def clear_switch(bulk: WriteStore, namespace: str | None, *, now_s: float) -> None:
    """End the order for ``namespace``, or for the fleet. Raises ``StoreError``."""
    _write(bulk, _others(bulk, namespace, now_s))


def in_force(switches: Iterable[Switch], namespace: str | None, *, now_s: float) -> Switch | None:
    """Return the order that replicas of ``namespace`` follow: their own before the fleet's."""
    fleet = None
    for switch in switches:
        if switch.until_s > now_s and switch.namespace in (None, namespace):
            if switch.namespace is not None:
                return switch
            fleet = switch
    return fleet


class Named(Protocol):
    """A replica's namespace, which changes when its weights do."""

    name: str


class AdmissionSwitch:
    """Whether one replica loads, by its settings and an operator's order. For one thread. After
    ``start``, the document is read again when the mode is asked for and 20 seconds have gone by. If
    that fails, the last order stays in force until its own end."""

    def __init__(
        self,
        configured: Mode,
        bulk: ReadStore,
        namespace: Named,
        recorder: Recorder,
        submit: Callable[[Callable[[], Steps[None]]], bool],
        *,
        clock: Callable[[], float] = time,
    ) -> None:
        """``configured`` applies without an order. ``submit`` runs a job in the background, or
        refuses."""
        self._configured: Mode = configured
        self._bulk = bulk
        self._namespace = namespace
        self._recorder = recorder
        self._submit = submit
        self._clock = clock
        self._switches: tuple[Switch, ...] = ()
        self._shown: Switch | None = None
        self._asked_at: float | None = None

    def start(self) -> None:
        """Read the document in the background, now and from now on."""
        self._asked_at = self._clock()
        self._submit(self.read)

    @property
    def mode(self) -> Mode:
        """The mode that applies now. Never waits."""
        if self._asked_at is not None and abs(self._clock() - self._asked_at) >= _INTERVAL_S:
            self.start()
        found = self._order() if self._switches else None
        return self._configured if found is None else found.mode

    def read(self) -> Steps[None]:
        """Read the document. Never raises."""
        try:
            document = yield from in_steps(self._bulk.get(SWITCH_PATH, 0, _DOCUMENT_BYTES_MAX))
            self._switches = _parse(document)
        except (StoreError, PayloadError):
            self._recorder.count("admission_switch_errors")
        self._show()

    def _order(self) -> Switch | None:
        return in_force(self._switches, self._namespace.name, now_s=self._clock())

    def _show(self) -> None:
        found = self._order()
        if found == self._shown:
            return
        self._shown = found
        self._recorder.level("admission_switched", float(found is not None))
        if found is None:
            logger.warning("operator's order ended admission=%s", self._configured)
        else:
            order = (found.mode, found.until_s, found.by)
            logger.warning("operator's order admission=%s until_s=%d by=%s", *order)


def _others(bulk: ReadStore, namespace: str | None, now_s: float) -> list[Switch]:
    try:
        kept = read_switches(bulk)
    except PayloadError:  # the new document replaces it
        kept = ()
    return [one for one in kept if one.namespace != namespace and one.until_s > now_s]


def _write(bulk: WriteStore, switches: list[Switch]) -> None:
    if len(switches) > _SWITCHES_MAX:
        raise ConfigError(
            f"more than {_SWITCHES_MAX} orders are in force: end some with objkv admission clear -n"
        )
    bulk.put(SWITCH_PATH, _DOCUMENT.dump_json(_Document(1, tuple(switches))))


def _parse(document: bytes | None) -> tuple[Switch, ...]:
    try:
        found = () if document is None else _DOCUMENT.validate_json(document).switches
    except ValidationError as exc:
        raise PayloadError(
            f"{SWITCH_PATH} is not a document of objkv; objkv admission clear replaces it"
        ) from exc
    return tuple(replace(one, by="".join(filter(str.isprintable, one.by))) for one in found)
