"""The errors of objkv: each class says who can act. A miss is a value, never an error.

Only the connector and the command line catch ``ObjkvError``; the connector turns every one of
them into a miss, so none ever reaches the engine.
"""

from objkv.redact import hide_in_current_error, without_secrets


class ObjkvError(Exception):
    """Base of everything objkv raises on purpose. Shows no secret, also in words of a server."""

    def __init__(self, *words: object) -> None:
        super().__init__(*(without_secrets(w) if isinstance(w, str) else w for w in words))
        hide_in_current_error()


class ConfigError(ObjkvError):
    """The operator can act, at start-up: the message says what to change."""


class StoreError(ObjkvError):
    """A store or an index failed. ``transient``: a later call may succeed."""

    transient: bool = False


class StoreUnavailable(StoreError):
    """No answer, or an answer that asks to come back later (HTTP 429, 5xx, time-out)."""

    transient = True


class StoreBusy(StoreUnavailable):
    """The server answered that it is overloaded (HTTP 429, 503). Saves give way first."""


class LeftAlone(StoreUnavailable):
    """No request was made: a circuit breaker is open."""


class StoreDenied(StoreError):
    """The server answered no: credentials, ACL, a missing bucket. The operator can act."""


class ValueTooLong(StoreError):
    """A stored value is longer than the buffer it was to fill: not what the index promised."""


class PayloadError(ObjkvError):
    """Bytes that are not what they claim to be: the payload is evicted."""


class KeyMismatch(PayloadError):
    """Sealed with a key that this process does not have: the payload may well be good."""


class TransferError(ObjkvError):
    """This process could not move bytes: no slab, queue full, deadline passed, closed."""
