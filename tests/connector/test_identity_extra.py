"""Settings of vLLM that change KV and that neither weights nor groups show."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.connector.translate import further_settings

ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def settings(max_model_len: int, rope: dict[str, Any]) -> dict[str, str]:
    model = SimpleNamespace(
        dtype="torch.bfloat16",
        hf_overrides={},
        multimodal_config=None,
        max_model_len=max_model_len,
        hf_text_config=SimpleNamespace(rope_parameters=rope),
    )
    return dict(further_settings(cast("Any", SimpleNamespace(model_config=model))))


def test_replicas_of_a_longrope_model_share_only_on_one_side_of_its_original_length() -> None:
    """vLLM takes the long factors for all positions where the engine's length exceeds it."""
    assert settings(4096, ROPE) == settings(2048, ROPE)
    assert settings(4097, ROPE) == settings(131_072, ROPE)
    assert settings(4096, ROPE) != settings(4097, ROPE)


@pytest.mark.parametrize("rope", [{}, {"rope_type": "default"}, {"rope_type": "yarn"}])
def test_the_engines_length_does_not_matter_to_other_models(rope: dict[str, Any]) -> None:
    assert settings(2048, rope) == settings(131_072, rope) == {"dtype": "bfloat16"}
