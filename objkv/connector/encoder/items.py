"""The images, sounds and videos of requests, and the plans with their outputs. A plan contains the
verified outputs themselves: once vLLM relies on a promise, no fetch may fail. vLLM sends arrays of
1 MiB and more beside its pickle, and messages above its ring's 24 MiB through a socket. Source:
vLLM 0.32, ``MessageQueue.enqueue`` in ``distributed/device_communicators/shm_broadcast.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from objkv.codec.values import Claim, LayerSpec
from objkv.keys.encoder import encoder_key, encoder_root
from objkv.telemetry import added

LAYER = "encoder"
"""Name of the single layer in an output's payload."""
Pages = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """The name and the expected form of one item's output."""

    namespace: str
    item_hash: bytes
    embeds: int
    """Rows."""
    width: int
    """Elements of a row. 0 if it is unknown or the output too large, so that it is not loaded."""
    dtype: str
    """A safetensors dtype name."""

    @property
    def claim(self) -> Claim:
        """The claim of its payload: rows ``[0, embeds)``."""
        key = encoder_key(self.namespace, self.item_hash)
        return Claim(key, encoder_root(self.namespace), 0, self.embeds)

    @property
    def layer(self) -> LayerSpec:
        """Its single layer, stored as one block of one head."""
        return LayerSpec(LAYER, self.dtype, (1, 1, self.embeds, self.width))


@dataclass
class EncoderPlan(ECConnectorMetadata):
    """From the scheduler to the workers: the loads and saves of this step, by identifier."""

    loads: Mapping[str, tuple[EncoderOutput, Pages]] = field(default_factory=dict)
    """Outputs that workers add to vLLM's encoder cache, with ``[output.layer.nbytes]`` uint8,
    C-contiguous, verified, never changed."""
    saves: Mapping[str, EncoderOutput] = field(default_factory=dict)
    """Outputs that are encoded in this step."""


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """From the workers to the scheduler: numbers, which vLLM's first model runner does not collect.
    Source: vLLM 0.32, ``v1/worker/ec_connector_model_runner_mixin.py``."""

    numbers: dict[str, float]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "EncoderReport":
        """Add another worker's numbers."""
        assert isinstance(other, EncoderReport)
        return EncoderReport(added(self.numbers, other.numbers))


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The form of this replica's outputs."""

    dtype: str
    """A safetensors dtype name."""
    width: Callable[[str], int | None]
    """Returns the elements per row of a modality's outputs, None if they are unknown."""
    item_bytes_max: int
    """Larger outputs are neither loaded nor saved."""
    media_named: bool
    """Whether an image's identifier depends on its content, so that it is the same everywhere."""
    tower_lora: bool
    """Whether adapters change encoder outputs. Those of requests with one are not shared then."""


class Item(NamedTuple):
    """One image, sound or video of a request, even if its prompt contains it several times."""

    output: EncoderOutput
    end: int
    """Tokens up to the end of its last occurrence in the prompt."""
