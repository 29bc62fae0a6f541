"""Prompts with images are shared only where an image's name says what it shows."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from objkv.config import Config
from objkv.connector.kv.scheduler import Roles, SchedulerSide
from objkv.connector.model.groups import Geometry
from objkv.connector.model.identity import names_media
from objkv.index.memory import MemoryIndex
from objkv.index.near import NearIndex
from objkv.keys.identity import GroupIdentity, Identity
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder

GROUP = GroupIdentity("full", None, ("l0",), heads=1, content=8, block_size=32)
IDENTITY = Identity("m", "w", None, "bfloat16", (GROUP,), "canonical", 32, 0, "default")


def engine(*, prefix_caching: bool, cache_gb: float | None) -> Any:
    multimodal = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "named"),
    [
        (True, 4, True),
        (True, 0, True),
        (False, 4, True),
        (False, 0, False),
        (False, None, True),
    ],
)
def test_vllm_numbers_images_where_both_of_its_caches_are_off(
    prefix_caching: bool, cache_gb: float | None, named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert names_media(engine(prefix_caching=prefix_caching, cache_gb=cache_gb)) is named
    assert ("--mm-processor-cache-gb" in caplog.text) is not named


@pytest.mark.parametrize(
    ("dtype", "scales", "alike"),
    [(None, None, True), ("fp8", "/scales.json", True), ("fp8", None, False)],
)
def test_what_fp8_encoders_make_of_an_image_depends_on_earlier_ones_without_given_scales(
    dtype: str | None, scales: str | None, alike: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine(prefix_caching=True, cache_gb=4)
    one.model_config.multimodal_config.mm_encoder_attn_dtype = dtype
    one.model_config.multimodal_config.mm_encoder_fp8_scale_path = scales
    assert names_media(one) is alike
    assert ("--mm-encoder-fp8-scale-path" in caplog.text) is not alike


@pytest.mark.parametrize(
    ("named", "images", "shared"), [(True, 1, 1), (False, 1, 0), (False, 0, 1)]
)
def test_a_prompt_with_an_image_that_only_has_a_number_is_left_alone(
    named: bool, images: int, shared: int
) -> None:
    """The first image of every process has the same one: its KV would be another image's."""
    side = SchedulerSide(
        Config(chunk_tokens=32),
        Roles(True, True, copies_are_synchronous=True, steps_in_flight=1, media_named=named),
        Geometry((GROUP,), 32, 32, tp_size=1),
        IDENTITY,
        bulk=MemoryStore(),
        index=NearIndex(MemoryIndex(), records_max=8, ttl_s=1.0, fields=["0.L0-1_H0-1"]),
        recorder=MemoryRecorder(),
    )
    place = SimpleNamespace(offset=2, length=40)
    image = SimpleNamespace(identifier="renderer0-mm-1-image-0", mm_position=place)
    plain = {"request_id": "r", "all_token_ids": [7] * 64, "lora_request": None, "num_tokens": 64}
    plain |= {"cache_salt": None, "prompt_embeds": None, "resumable": False}
    request = cast("Any", SimpleNamespace(**plain, mm_features=[image] * images))
    side.track(request)
    tracked = side._requests.get("r")
    assert tracked is not None
    assert (tracked.may_load, tracked.may_save) == (bool(shared), bool(shared))
    side.close()
