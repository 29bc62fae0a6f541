"""The namespace that a tier lives in: when it begins, who may use it, and when it is left."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from objkv.connector.tier_identity import TierIdentity, none_hash

logger = logging.getLogger(__name__)


class TierHome:
    """Where chunks of a request belong. The scheduler's thread only; never waits."""

    def __init__(self, identity: TierIdentity, announce: Callable[[str, bytes], bool]) -> None:
        """
        Args:
            announce: stores a namespace's document in the background; False if there is no room.
        """
        self.identity = identity
        self._announce = announce
        self._announced: str | None = None
        self._name: str | None = None
        self._live: set[str] = set()
        self._distrusted: set[str] = set()
        self.open = True
        """False while vLLM's own memory may hold KV of other weights than it computes with."""

    @property
    def namespace(self) -> str | None:
        """None while nothing may be loaded or saved."""
        return self._name if self.open else None

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return not self._live

    def begin(self, request_id: str) -> None:
        """A request. vLLM chooses how it hashes after it made its tiers, and before the first."""
        self._live.add(request_id)
        if self._name is None and (first := none_hash()) is not None:
            self.identity = replace(self.identity, none_hash=first)
            self._name = self.identity.namespace()
            logger.info("objkv tier namespace=%s", self._name)
        name = self.namespace
        if name is not None and self._announced != name:
            document = self.identity.canonical()
            self._announced = name if self._announce(name, document) else None

    def end(self, request_id: str) -> None:
        """It ended."""
        self._live.discard(request_id)
        self._distrusted.discard(request_id)

    def of(self, request_id: str) -> str | None:
        """None too for requests that began before the last renewal."""
        return None if request_id in self._distrusted else self.namespace

    def renew(self, *, clean: bool) -> bool:
        """Weights may have changed: leave the namespace; True if there is a new one, which is this
        replica's own, by a random number.

        ``clean``: whether vLLM dropped all that its own memory held, of the device and of the CPU.
        If not, nothing is loaded or saved until a renewal that is.
        """
        self.open = clean
        self._distrusted |= self._live
        extra = {**dict(self.identity.extra), "reset": secrets.token_hex(8)}
        self.identity = replace(self.identity, extra=tuple(sorted(extra.items())))
        if self._name is not None:
            self._name = self.identity.namespace()
        if clean:
            logger.warning(
                "cache reset, the tier shares with nobody until a restart namespace=%s", self._name
            )
        else:
            logger.warning(
                "the tier neither loads nor saves until vLLM's caches are reset while no request "
                "holds a block: reset_prefix_cache(reset_running_requests=True, "
                "reset_connector=True)"
            )
        return clean
