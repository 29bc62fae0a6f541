"""The namespace that this replica lives in: its identity document, stored once, and its renewal."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from objkv.keys.encoder import EncoderIdentity
from objkv.keys.identity import Identity, identity_path
from objkv.stores.base import WriteStore

logger = logging.getLogger(__name__)


class Home:
    """Where chunks of new requests belong. The scheduler's thread only, but for storing."""

    def __init__(
        self,
        identity: Identity | EncoderIdentity,
        bulk: WriteStore,
        submit: Callable[[Callable[[], None]], bool],
        *,
        writes: bool,
    ) -> None:
        self._identity = identity
        self._bulk = bulk
        self._submit = submit
        self._writes = writes
        self._stored: set[str] = set()
        self._storing = False
        self.namespace = identity.namespace()
        self.open = True
        """False while it is not known which weights the replica's own blocks are from."""
        self._tell()

    def announce(self) -> None:
        """Store the identity document in the background, unless it is stored or on its way."""
        namespace, identity = self.namespace, self._identity
        if not self._writes or self._storing or namespace in self._stored:
            return

        def put() -> None:
            try:
                self._bulk.put_if_absent(identity_path(namespace), identity.canonical())
                self._stored.add(namespace)
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
            logger.warning("cache not reset, blocks in use: neither loading nor saving until it is")
            return False
        extra = {**dict(self._identity.extra), "reset": secrets.token_hex(8)}
        epoch = self._identity.weights_epoch + 1
        self._identity = replace(
            self._identity, weights_epoch=epoch, extra=tuple(sorted(extra.items()))
        )
        self.namespace = self._identity.namespace()
        self._tell()
        logger.warning(
            "cache reset, sharing with nobody until weights_epoch is set namespace=%s",
            self.namespace,
        )
        self.announce()
        return True

    def _tell(self) -> None:
        """Replicas that only load store no document, and may not be allowed to: theirs is in their
        log, where ``objkv diff`` finds it."""
        if not self._writes:
            document = self._identity.canonical().decode()
            logger.info("objkv identity namespace=%s document=%s", self.namespace, document)
