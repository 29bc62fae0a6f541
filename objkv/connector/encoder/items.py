"""What the scheduler's side knows of each request's images, sounds and videos, and their names."""

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


# A plan carries the outputs themselves, verified: once the scheduler was promised that an item need
# not be encoded, nothing that a worker would still have to fetch may fail. vLLM sends arrays of 1
# MiB and more beside its pickle, and pieces above its ring's 24 MiB through a socket. Source:
# vLLM 0.32, ``MessageQueue.enqueue`` in ``distributed/device_communicators/shm_broadcast.py``.

LAYER = "encoder"
"""Name of an output's one layer in its payload."""
Pages = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class EncoderOutput:
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
    output: EncoderOutput
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


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What outputs of this replica look like."""

    dtype: str
    """A safetensors dtype name."""
    width: Callable[[str], int | None]
    """Elements in a row of a modality's outputs; None where that is not known, so that they cannot
    be verified."""
    item_bytes_max: int = LAYER_BYTES_MAX
    """Larger outputs are not brought in."""
    media_named: bool = True
    """Whether an identifier says what an image shows, here and everywhere."""
    tower_lora: bool = False
    """Whether adapters change what encoders make of an image."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, sound or video of a request, wherever in its prompt and however often."""

    identifier: str
    item_hash: bytes
    embeds: int
    """Rows of its output."""
    end: int
    """Tokens up to the end of its last place in the prompt."""
    output: EncoderOutput | None
    """What it must be to be loaded; None if it cannot be."""


@dataclass(slots=True)
class TrackedMedia:
    """One request with media. ``request`` is vLLM's own, read and never changed."""

    request: "Request"
    namespace: str
    deadline: float
    """Until when what names its items has to be known."""
    end: int
    """Tokens up to the end of its last item: beyond it nothing is loaded or saved."""
    named: bool = False
    items: dict[str, Item] = field(default_factory=dict)
    """By identifier; none before they have names, nor where they must not be shared."""
    asked: bool = False
    """Whether it was asked which of them are stored."""


class ItemTracker:
    """Requests by id. Used by the scheduler's thread only; never waits."""

    def __init__(self, form: OutputForm, adapters: Adapters, recorder: Recorder) -> None:
        self._form = form
        self._adapters = adapters
        self._recorder = recorder
        self._tracked: dict[str, TrackedMedia] = {}

    def get(self, request_id: str) -> TrackedMedia | None:
        """What is known of a request that has not ended."""
        return self._tracked.get(request_id)

    def add(self, request: "Request", namespace: str, deadline: float) -> TrackedMedia:
        """Start to follow a request."""
        places = (feature.mm_position for feature in request.mm_features)
        tracked = TrackedMedia(
            request, namespace, deadline, max((p.offset + p.length for p in places), default=0)
        )
        self._tracked[request.request_id] = tracked
        if not self._form.media_named or request.resumable:
            # Resumable, a session: images are added to it later.
            self._leave_alone(tracked)
        return tracked

    def name(self, tracked: TrackedMedia) -> bool:
        """Whether the request's items have names now, or never will."""
        if tracked.named:
            return True
        request, lora = tracked.request, None
        if self._form.tower_lora and request.lora_request is not None:
            try:
                lora = self._adapters.digest(request.request_id, request.lora_request)
            except UnknownAdapterError:
                self._recorder.count("adapters_unknown")
                self._leave_alone(tracked)
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
        """Stop following a request."""
        self._adapters.ended(request_id)
        return self._tracked.pop(request_id, None)

    def distrust(self) -> Iterable[tuple[str, list[Item]]]:
        """Weights may have changed: items of requests under way are neither loaded nor saved any
        more. Yields what each of those requests had."""
        self._adapters.forget()
        for request_id, tracked in self._tracked.items():
            items = list(tracked.items.values())
            self._leave_alone(tracked)
            yield request_id, items

    def _leave_alone(self, tracked: TrackedMedia) -> None:
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
