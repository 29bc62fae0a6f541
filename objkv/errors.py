"""Errors of objkv, one class for each party that can act. A miss is a value, never an error.

Only the connector and the command line catch ``ObjkvError``. The connector turns each one into a
miss, so no error reaches the engine.
"""

from collections.abc import Sequence
from typing import Final

from objkv.redact import hide_in_current_error, printable, without_secrets

SCAN_DENIED: Final = (
    "SCAN is only in the ACL of the role sweeper: run this as that role, with the rights that "
    "`objkv access --role sweeper` prints"
)
"""Part of the message of a ``StoreDenied`` for a scan that only the sweeper may do."""


class ObjkvError(Exception):
    """Base class of objkv's errors. Masks secrets, including secrets in a server's message, and
    control characters: each message is a line."""

    def __init__(self, *words: object) -> None:
        super().__init__(
            *(printable(without_secrets(w)) if isinstance(w, str) else w for w in words)
        )
        hide_in_current_error()


class ConfigError(ObjkvError):
    """The operator must change a setting, or a program an argument. The message names the change.
    Raised at start-up and for wrong arguments."""


class UnclearName(ConfigError):
    """A name fits no namespace or several. ``choices`` has a line for each that exists."""

    def __init__(self, what: str, choices: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.choices = tuple(choices)
        for choice in choices:  # shown in a traceback
            self.add_note(choice)


class NotStored(ConfigError):
    """The prompt or chunk that a call names is not stored."""


class StoreError(ObjkvError):
    """A store or an index failed. ``transient``: a later call may succeed."""

    transient: bool = False


class StoreUnavailable(StoreError):
    """The server gave no answer, timed out, or answered HTTP 429 or 5xx."""

    transient = True


class StoreBusy(StoreUnavailable):
    """The server answered that it is overloaded (HTTP 429, 503). Saves pause first."""


class StoreFull(StoreUnavailable):
    """The server has no room for a value. It may evict others later; the operator can add room."""


class LeftAlone(StoreUnavailable):
    """No request was made: a circuit breaker is open."""


class StoreDenied(StoreError):
    """The server refused: credentials, ACL or a missing bucket. The operator can act."""


class ValueTooLong(StoreError):
    """A stored value is longer than the caller's buffer, so it differs from its index record."""


class PayloadError(ObjkvError):
    """The bytes do not match their claim. The payload is evicted."""


class KeyMismatch(PayloadError):
    """The payload is sealed with a key that this process lacks. It may be intact."""


class TransferError(ObjkvError):
    """This process could not move bytes: no free slab, full queue, missed deadline, or closed."""


def pip_install(extra: str) -> str:
    """The command that adds an extra to the installed objkv.

    pip keeps the installed objkv and downloads only what the extra needs, so this also works for
    an objkv that was installed from a clone or from a file.
    """
    return f"pip install 'objkv[{extra}]'"
