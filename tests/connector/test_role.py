"""Who saves: vLLM's role of a replica, and what its rights allow."""

import pytest

from objkv.config import Config
from objkv.connector.kv.wiring import saves
from objkv.errors import ConfigError


@pytest.mark.parametrize(
    ("role", "producer", "consumer", "saving"),
    [
        ("writer", True, True, True),
        ("writer", False, True, False),
        ("reader", True, True, False),
        ("reader", False, True, False),
    ],
)
def test_a_replica_saves_if_vllm_wants_it_and_its_rights_allow_it(
    role: str, producer: bool, consumer: bool, saving: bool
) -> None:
    assert (
        saves(Config.model_validate({"role": role}), producer=producer, consumer=consumer) is saving
    )


def test_a_producer_without_the_right_to_save_is_refused() -> None:
    with pytest.raises(ConfigError, match="set role to writer"):
        saves(Config(role="reader"), producer=True, consumer=False)
