"""Whether a replica saves: vLLM's role of it wants that, and its rights allow it."""

from objkv.config import Config
from objkv.errors import ConfigError


def saves(config: Config, *, producer: bool, consumer: bool) -> bool:
    """Whether this replica stores anything; with the rights of a reader it does not try.

    Args:
        producer: whether vLLM's configuration has it save (``kv_role``, ``ec_role``).
        consumer: whether it has it load.

    Raises ``ConfigError`` for a replica that would then do nothing at all.
    """
    if config.role != "reader":
        return producer
    if producer and not consumer:
        raise ConfigError(
            "role is reader, and vLLM's role of this replica is that of a producer, which only "
            "saves: set role to writer, or let the replica load"
        )
    return False
