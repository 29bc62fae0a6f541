"""The images, sounds and videos of requests, their names, and the plans with their outputs.

A plan contains the verified outputs themselves. Once vLLM relies on a promise not to encode an
item, no fetch on a worker may fail. vLLM sends arrays of 1 MiB and more separately from its pickle,
and messages above its ring's 24 MiB through a socket. Source: vLLM 0.32, ``MessageQueue.enqueue``
in ``distributed/device_communicators/shm_broadcast.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from objkv.codec.payload import Claim, LayerSpec
from objkv.connector.model.adapters import Adapters, UnknownAdapterError
from objkv.keys.encoder import encoder_hash, encoder_key, encoder_root
from objkv.telemetry import Recorder, added

if TYPE_CHECKING:
    from vllm.v1.request import Request

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
    """Elements of a row. 0 if the output cannot be loaded, because its width is unknown or it is
    too large."""
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
    """From the workers to the scheduler: numbers. vLLM's first model runner does not collect an
    encoder connector's statistics from workers. Source: vLLM 0.32,
    ``v1/worker/ec_connector_model_runner_mixin.py``."""

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
    """Returns the elements per row of a modality's outputs. None: unknown, so they cannot be
    verified."""
    item_bytes_max: int
    """Larger outputs are neither loaded nor saved."""
    media_named: bool
    """Whether an image's identifier depends on its content, so that it is the same everywhere."""
    tower_lora: bool
    """Whether adapters change encoder outputs."""


class Item(NamedTuple):
    """One image, sound or video of a request, even if its prompt contains it several times."""

    output: EncoderOutput
    end: int
    """Tokens up to the end of its last occurrence in the prompt."""


class ItemNames:
    """Names the items of requests. For the scheduler's thread only. Never waits."""

    def __init__(self, form: OutputForm, adapters: Adapters, recorder: Recorder) -> None:
        self._form, self._adapters, self._recorder = form, adapters, recorder

    def name(self, request: "Request", namespace: str) -> dict[str, Item] | None:
        """Return a request's items by identifier, none if they must not be shared. None while its
        adapter is unknown."""
        lora = None
        if not self._form.media_named or request.resumable:
            return {}  # a resumable session may get more images later
        if self._form.tower_lora and request.lora_request is not None:
            try:
                lora = self._adapters.digest(request.request_id, request.lora_request)
            except UnknownAdapterError:
                self._recorder.count("adapters_unknown")
                return {}
            if lora is None:
                return None
        items: dict[str, Item] = {}
        for index, feature in enumerate(request.mm_features):
            place, identifier = feature.mm_position, feature.identifier
            end = place.offset + place.length
            if (known := items.get(identifier)) is None:
                name = encoder_hash(
                    namespace, identifier, lora_digest=lora, salt=request.cache_salt
                )
                embeds = request.get_num_encoder_embeds(index)
                known = Item(self._output(namespace, name, embeds, feature.modality), end)
            items[identifier] = Item(known.output, max(known.end, end))
        return items

    def _output(self, namespace: str, name: bytes, embeds: int, modality: str) -> EncoderOutput:
        dtype, width = self._form.dtype, self._form.width(modality)
        if width is not None and embeds > 0:
            output = EncoderOutput(namespace, name, embeds, width, dtype)
            if output.layer.nbytes <= self._form.item_bytes_max:
                return output
            self._recorder.count("load_oversized")
        return EncoderOutput(namespace, name, embeds, 0, dtype)
