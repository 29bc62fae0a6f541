"""How long one call on Redis may take. Importing the client itself takes half a second."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from objkv.config import Config

CONNECT_FLOOR_S = 1.0
READ_FLOOR_S = 2.0


def call_s(config: "Config") -> float:
    """Return the most seconds for one call: connecting, waiting for a connection, and repeating
    the command, which is twice the limit for one answer."""
    return CONNECT_FLOOR_S + 2 * read_s(config)


def read_s(config: "Config") -> float:
    """Return the most seconds for one answer."""
    return max(READ_FLOOR_S, 2 * config.lookup_deadline_ms / 1000)
