"""A replica's namespace: stores its identity document once, and renews it after a reset."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from objkv.background import Steps, in_steps
from objkv.keys.identity import NamespaceIdentity, identity_path
from objkv.stores.base import WriteStore

logger = logging.getLogger(__name__)

IdentityT = TypeVar("IdentityT", bound=NamespaceIdentity)


class ReplicaNamespace(Generic[IdentityT]):
    """The namespace of new requests' chunks. For the scheduler's thread only. Never waits."""

    closed_text: ClassVar = "cache not reset, blocks in use: loading and saving nothing until it is"
    """What is logged when it is left while requests hold blocks."""

    def __init__(
        self,
        identity: IdentityT,
        bulk: WriteStore,
        submit: Callable[[Callable[[], Steps[None]]], bool],
        *,
        writes: bool,
    ) -> None:
        """``submit`` runs a job in the background, or returns False if too many are queued."""
        self.identity, self._writes = identity, writes
        self._bulk, self._submit = bulk, submit
        self._stored: set[str] = set()
        self._storing = False
        self._logged = ""
        """The namespace whose document was logged last."""
        self.open = True
        """False while the replica's own blocks may come from old weights."""
        self.name: str = identity.namespace()

    def announce(self) -> None:
        """Log the identity document, which ``objkv diff`` reads from any replica's log, and store
        it in the background, unless that was done or has begun. A replica that only loads may lack
        the rights to store it."""
        name = self.name
        if name != self._logged:
            self._logged = name
            logged = self.identity.canonical().decode()
            logger.info("objkv identity namespace=%s document=%s", name, logged)
        if not self._writes or self._storing or name in self._stored:
            return
        document = self.identity.canonical()

        def put() -> Steps[None]:
            try:
                yield from in_steps(self._bulk.put_if_absent(identity_path(name), document))
                self._stored.add(name)
            finally:
                self._storing = False

        self._storing = True  # before ``put`` can end, which may be before ``submit`` returns
        if not self._submit(put):
            self._storing = False

    def renew(self, *, clean: bool) -> bool:
        """Leave the namespace because weights may have changed. True if there is a new namespace.

        It contains a random number, so it is private to this replica: a counter would not identify
        the weights. Sharing resumes when the operator sets ``weights_epoch``, or after a restart
        with the new weights on disk.

        ``clean``: whether vLLM dropped every block of its own prefix cache. If not, requests may
        still hit blocks of the old weights, so nothing is loaded or saved until a clean renewal.
        """
        self.open = clean
        if not clean:
            logger.warning(self.closed_text)
            return False
        extra = {**dict(self.identity.extra), "reset": secrets.token_hex(8)}
        self.identity = replace(
            self.identity,
            weights_epoch=self.identity.weights_epoch + 1,
            extra=tuple(sorted(extra.items())),
        )
        self.name = self.identity.namespace()
        logger.warning(
            "cache reset, sharing nothing until weights_epoch is set namespace=%s", self.name
        )
        self.announce()
        return True
