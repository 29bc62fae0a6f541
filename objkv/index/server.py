"""Facts that a Redis-like server reports about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Values that the server reports; None if it does not (managed servers often deny CONFIG)."""

    product: str
    """``redis`` or ``valkey``."""
    version: str | None
    mode: str | None
    """``standalone``, ``cluster`` or ``sentinel``."""
    maxmemory_bytes: int | None
    maxmemory_policy: str | None
    used_bytes: int | None
    clock_skew_s: float | None
    """Server's clock minus this machine's, reduced by the possible duration of its answer."""
    denied: tuple[str, ...] = ()
    """Commands that the ACL denied."""
