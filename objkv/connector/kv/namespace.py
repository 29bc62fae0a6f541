"""The namespace that a replica lives in: its identity document, stored once, and its renewal."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from objkv.keys.identity import identity_path
from objkv.stores.base import WriteStore

logger = logging.getLogger(__name__)

IdentityT = TypeVar("IdentityT", bound=Any)
"""A frozen dataclass with ``weights_epoch``, ``extra``, ``namespace()`` and ``canonical()``."""


class ReplicaNamespace(Generic[IdentityT]):
    """Where chunks of new requests belong. The scheduler's thread only; never waits."""

    def __init__(
        self,
        identity: IdentityT,
        bulk: WriteStore,
        submit: Callable[[Callable[[], None]], bool],
        *,
        writes: bool,
    ) -> None:
        """``submit`` runs a job in the background, unless there are too many."""
        self.identity = identity
        self._bulk = bulk
        self._submit = submit
        self._writes = writes
        self._stored: set[str] = set()
        self._storing = False
        self.open = True
        """False while it is not known which weights the replica's own blocks are from."""
        self.name: str = identity.namespace()

    def announce(self) -> None:
        """Store the identity document in the background, unless it is stored or on its way.

        A replica that only loads stores none, and may not be allowed to: it logs its document, once
        for each name, and ``objkv diff`` finds it there.
        """
        name = self.name
        if self._storing or name in self._stored:
            return
        document = self.identity.canonical()
        if not self._writes:
            self._stored.add(name)
            logger.info("objkv identity namespace=%s document=%s", name, document.decode())
            return

        def put() -> None:
            try:
                self._bulk.put_if_absent(identity_path(name), document)
                self._stored.add(name)
            finally:
                self._storing = False

        self._storing = True  # before ``put`` can end, which may be before ``submit`` returns
        if not self._submit(put):
            self._storing = False

    def renew(self, *, clean: bool) -> bool:
        """Weights may have changed: leave the namespace; True if there is a new one.

        The new one is this replica's own, by a random number: an epoch that was only counted up
        would not say which weights it stands for, and replicas that were updated a different
        number of times would read each other's KV. Sharing begins again when the operator sets
        ``weights_epoch``, or after a restart with the new weights on disk.

        ``clean``: whether vLLM dropped every block of its own prefix cache. If not, blocks of the
        old weights may still be hit, so nothing is loaded or saved until a renewal that is.
        """
        self.open = clean
        if not clean:
            self._log_closed()
            return False
        extra = {**dict(self.identity.extra), "reset": secrets.token_hex(8)}
        self.identity = replace(
            self.identity,
            weights_epoch=self.identity.weights_epoch + 1,
            extra=tuple(sorted(extra.items())),
        )
        self.name = self.identity.namespace()
        logger.warning(
            "cache reset, sharing with nobody until weights_epoch is set namespace=%s", self.name
        )
        self.announce()
        return True

    def _log_closed(self) -> None:
        logger.warning("cache not reset, blocks in use: neither loading nor saving until it is")
