"""What crosses between the scheduler's process and the workers' for encoder outputs.

A plan carries the outputs themselves, verified: once the scheduler was told that an item need not
be encoded, nothing that a worker would still have to fetch may fail. vLLM sends arrays of 1 MiB and
more beside its pickle, and pieces above its ring's 24 MiB through a socket. Source: vLLM 0.32,
``MessageQueue.enqueue`` in ``distributed/device_communicators/shm_broadcast.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from objkv.codec.payload import Claim, LayerSpec
from objkv.keys.encoder import encoder_key, encoder_root
from objkv.telemetry import added

LAYER = "encoder"
"""Name of an output's one layer in its payload."""

Pages = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Output:
    """What one item's output must be, and what it is called."""

    namespace: str
    item_hash: bytes
    embeds: int
    width: int
    dtype: str
    """A safetensors dtype name."""

    @property
    def claim(self) -> Claim:
        """What its payload must say it is: rows ``[0, embeds)``."""
        key = encoder_key(self.namespace, self.item_hash)
        return Claim(key, encoder_root(self.namespace), 0, self.embeds)

    @property
    def layer(self) -> LayerSpec:
        """Its one layer, as if it were one block of one head."""
        return LayerSpec(LAYER, self.dtype, (1, 1, self.embeds, self.width))


@dataclass(frozen=True, slots=True, eq=False)
class ItemLoad:
    """One output that workers put into vLLM's encoder cache."""

    identifier: str
    output: Output
    pages: Pages
    """``[output.layer.nbytes]`` uint8, C-contiguous, verified; never changed."""


@dataclass(frozen=True, slots=True)
class ItemSave:
    """One output that is encoded in this step, and how it is called."""

    item_hash: bytes
    embeds: int
    replaces: bool = False
    """Whether what is stored was found corrupt."""


@dataclass
class EncoderPlan(ECConnectorMetadata):
    """Scheduler → workers: what to load and save in this step."""

    namespace: str
    loads: tuple[ItemLoad, ...] = ()
    saves: Mapping[str, ItemSave] = field(default_factory=dict)
    """By identifier."""


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """Workers → scheduler: what was counted. vLLM's first model runner takes no statistics of an
    encoder connector from workers. Source: vLLM 0.32,
    ``v1/worker/ec_connector_model_runner_mixin.py``."""

    numbers: dict[str, float]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "EncoderReport":
        """All workers' numbers together."""
        assert isinstance(other, EncoderReport)
        return EncoderReport(added(self.numbers, other.numbers))
