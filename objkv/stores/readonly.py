"""A store of which nothing is changed: for replicas that may only read it."""

from objkv.errors import StoreDenied
from objkv.stores.base import Buffer, Unfinished
from objkv.stores.guarded import WrappedStore

_REASON = "role is reader, and this would write: set role to writer or sweeper where it may"


class ReadOnlyStore(WrappedStore):
    """Reads ``inner``; every other call is ``StoreDenied`` and reaches nobody. Readers do not make
    them: this is for the one that is overlooked."""

    def __repr__(self) -> str:
        return f"<ReadOnlyStore of {self._inner!r}>"

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        """``StoreDenied``."""
        raise StoreDenied(f"put_if_absent {key}: {_REASON}")

    def put(self, key: str, value: Buffer) -> None:
        """``StoreDenied``."""
        raise StoreDenied(f"put {key}: {_REASON}")

    def delete(self, key: str) -> bool:
        """``StoreDenied``."""
        raise StoreDenied(f"delete {key}: {_REASON}")

    def discard(self, unfinished: Unfinished) -> bool:
        """``StoreDenied``."""
        raise StoreDenied(f"discard {unfinished.key}: {_REASON}")
