"""The scheduler's state of each request's images, sounds and videos, and their names."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorMetadata,
    ECConnectorWorkerMetadata,
)

from objkv.codec.payload import LAYER_BYTES_MAX, Claim, LayerSpec
from objkv.connector.model.adapters import Adapters, UnknownAdapterError
from objkv.keys.encoder import encoder_hash, encoder_key, encoder_root
from objkv.telemetry import Recorder, added

if TYPE_CHECKING:
    from vllm.v1.request import Request


# A plan contains the verified outputs themselves. Once vLLM relies on a promise not to encode an
# item, no fetch on a worker may fail. vLLM sends arrays of 1 MiB and more separately from its
# pickle, and messages above its ring's 24 MiB through a socket. Source: vLLM 0.32,
# ``MessageQueue.enqueue`` in ``distributed/device_communicators/shm_broadcast.py``.

LAYER = "encoder"
"""Name of the single layer in an output's payload."""
Pages = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """The name and the expected form of one item's output."""

    namespace: str
    item_hash: bytes
    embeds: int
    width: int
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


@dataclass(frozen=True, slots=True, eq=False)
class ItemLoad:
    """One output that workers add to vLLM's encoder cache."""

    identifier: str
    output: EncoderOutput
    pages: Pages
    """``[output.layer.nbytes]`` uint8, C-contiguous, verified, never changed."""


@dataclass(frozen=True, slots=True)
class ItemSave:
    """One output that is encoded in this step, with its name."""

    item_hash: bytes
    embeds: int


@dataclass
class EncoderPlan(ECConnectorMetadata):
    """From the scheduler to the workers: the loads and saves of this step."""

    namespace: str
    loads: tuple[ItemLoad, ...] = ()
    saves: Mapping[str, ItemSave] = field(default_factory=dict)
    """Saves by identifier."""


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
    item_bytes_max: int = LAYER_BYTES_MAX
    """Larger outputs are not loaded."""
    media_named: bool = True
    """Whether an image's identifier depends on its content, so that it is the same everywhere."""
    tower_lora: bool = False
    """Whether adapters change encoder outputs."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, sound or video of a request, even if its prompt contains it several times."""

    identifier: str
    item_hash: bytes
    embeds: int
    """Rows of its output."""
    end: int
    """Tokens up to the end of its last occurrence in the prompt."""
    output: EncoderOutput | None
    """The output to load. None if it cannot be loaded."""


@dataclass(slots=True)
class TrackedMedia:
    """One request with media. ``request`` is owned by vLLM and never changed here."""

    request: "Request"
    namespace: str
    deadline: float
    """Time until which its items must have names."""
    end: int
    """Tokens up to the end of its last item. Nothing beyond it is loaded or saved."""
    named: bool = False
    items: dict[str, Item] = field(default_factory=dict)
    """Items by identifier. Empty until they have names, and if they must not be shared."""


class ItemTracker:
    """The requests with media, by id. For the scheduler's thread only. Never waits."""

    def __init__(self, form: OutputForm, adapters: Adapters, recorder: Recorder) -> None:
        self._form = form
        self._adapters = adapters
        self._recorder = recorder
        self._tracked: dict[str, TrackedMedia] = {}

    def get(self, request_id: str) -> TrackedMedia | None:
        """Return the state of a request, or None if it has ended."""
        return self._tracked.get(request_id)

    def add(self, request: "Request", namespace: str, deadline: float) -> TrackedMedia:
        """Track a request."""
        places = (feature.mm_position for feature in request.mm_features)
        tracked = TrackedMedia(
            request, namespace, deadline, max((p.offset + p.length for p in places), default=0)
        )
        self._tracked[request.request_id] = tracked
        if not self._form.media_named or request.resumable:
            # A resumable session may get more images later.
            self._skip(tracked)
        return tracked

    def name(self, tracked: TrackedMedia) -> bool:
        """Whether naming the request's items is done, even if they cannot be named."""
        if tracked.named:
            return True
        request, lora = tracked.request, None
        if self._form.tower_lora and request.lora_request is not None:
            try:
                lora = self._adapters.digest(request.request_id, request.lora_request)
            except UnknownAdapterError:
                self._recorder.count("adapters_unknown")
                self._skip(tracked)
                return True
            if lora is None:
                return False
        for index, feature in enumerate(request.mm_features):
            place, identifier = feature.mm_position, feature.identifier
            known = tracked.items.get(identifier)
            item = self._item(tracked, index, lora) if known is None else known
            end = max(item.end, place.offset + place.length)
            tracked.items[identifier] = Item(
                identifier, item.item_hash, item.embeds, end, item.output
            )
        tracked.named = True
        return True

    def end(self, request_id: str) -> TrackedMedia | None:
        """Stop tracking a request."""
        self._adapters.ended(request_id)
        return self._tracked.pop(request_id, None)

    def distrust(self) -> Iterable[tuple[str, list[Item]]]:
        """Stop loads and saves of all requests in progress, because weights may have changed.
        Yields each request with its items."""
        self._adapters.forget()
        for request_id, tracked in self._tracked.items():
            items = list(tracked.items.values())
            self._skip(tracked)
            yield request_id, items

    def _skip(self, tracked: TrackedMedia) -> None:
        tracked.items, tracked.named, tracked.end = {}, True, 0

    def _item(self, tracked: TrackedMedia, index: int, lora: bytes | None) -> Item:
        request = tracked.request
        feature = request.mm_features[index]
        name = encoder_hash(
            tracked.namespace, feature.identifier, lora_digest=lora, salt=request.cache_salt
        )
        embeds = request.get_num_encoder_embeds(index)
        output, width = None, self._form.width(feature.modality)
        if width is not None and embeds > 0:
            output = EncoderOutput(tracked.namespace, name, embeds, width, self._form.dtype)
            if output.layer.nbytes > self._form.item_bytes_max:
                self._recorder.count("load_oversized")
                output = None
        return Item(feature.identifier, name, embeds, 0, output)
