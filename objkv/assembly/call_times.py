"""Time limits of one Redis call, kept apart because importing the client takes half a second."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from objkv.config import Config

CONNECT_FLOOR_S = 1.0
READ_FLOOR_S = 2.0


def call_s(config: "Config") -> float:
    """Return the maximum seconds for one call: the time for connecting, plus twice the limit of one
    reply, for waiting for a connection and for repeating the command."""
    return CONNECT_FLOOR_S + 2 * read_s(config)


def read_s(config: "Config") -> float:
    """Return the maximum seconds for one reply."""
    return max(READ_FLOOR_S, 2 * config.lookup_deadline_ms / 1000)
