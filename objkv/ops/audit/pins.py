"""The pins of an audit's namespaces, with their authors and ends."""

from collections.abc import Mapping

from objkv.cache.pins import Pin, scan_pins
from objkv.errors import PayloadError
from objkv.ops.audit.report import PinAudit
from objkv.stores.base import ReadStore

PINS_MAX = 1_000


def read_active_pins(
    bulk: ReadStore, namespaces: Mapping[str, object], *, now_s: float
) -> tuple[tuple[PinAudit, ...], tuple[str, ...]]:
    """Return the active pins of these namespaces, the next to end first, and sentences about the
    documents that are unreadable or were not read. Raises ``StoreError``."""
    pins, problems = list[PinAudit](), list[str]()
    for name in namespaces:
        for pin in scan_pins(bulk, name):
            if isinstance(pin, PayloadError):
                problems.append(str(pin))
            elif pin.until_s > now_s:
                pins.append(_pinned(pin))
    pins.sort(key=lambda pin: (pin.until_s, pin.namespace, pin.leaf))
    if len(pins) > PINS_MAX:
        problems.append(f"{len(pins) - PINS_MAX:,} more pins are not listed")
    return tuple(pins[:PINS_MAX]), tuple(problems)


def _pinned(pin: Pin) -> PinAudit:
    return PinAudit(
        namespace=pin.namespace,
        leaf=pin.leaf.hex(),
        tokens=pin.tokens,
        chunks=len(pin.chunks),
        by=pin.by,
        created_s=pin.created_s,
        until_s=pin.until_s,
    )
