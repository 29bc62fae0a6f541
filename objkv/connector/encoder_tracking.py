"""What the scheduler's side knows of each request's images, sounds and videos, and their names."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from objkv.codec.payload import LAYER_BYTES_MAX
from objkv.connector.adapters import Adapters, UnknownAdapterError
from objkv.connector.encoder_metadata import Output
from objkv.keys.encoder import encoder_hash
from objkv.telemetry import Recorder

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What outputs of this replica look like."""

    dtype: str
    """A safetensors dtype name."""
    width: Callable[[str], int | None]
    """Of the outputs of a modality; None where it is not known, so that it cannot be verified."""
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
    output: Output | None
    """What it must be to be loaded; None if it cannot be."""


@dataclass(slots=True)
class Tracked:
    """One request with media. ``request`` is vLLM's own, read and never changed."""

    request: "Request"
    namespace: str
    deadline: float
    """Of what has to be known before its items have names."""
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
        self._tracked: dict[str, Tracked] = {}

    def get(self, request_id: str) -> Tracked | None:
        """What is known of a request that has not ended."""
        return self._tracked.get(request_id)

    def add(self, request: "Request", namespace: str, deadline: float) -> Tracked:
        """Start to follow a request."""
        places = (feature.mm_position for feature in request.mm_features)
        tracked = Tracked(
            request, namespace, deadline, max((p.offset + p.length for p in places), default=0)
        )
        self._tracked[request.request_id] = tracked
        if not self._form.media_named or request.resumable:
            # Resumable, a session: images are added to it later.
            self._leave_alone(tracked)
        return tracked

    def name(self, tracked: Tracked) -> bool:
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

    def end(self, request_id: str) -> Tracked | None:
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

    def _leave_alone(self, tracked: Tracked) -> None:
        tracked.items, tracked.named, tracked.end = {}, True, 0

    def _item(self, tracked: Tracked, index: int, lora: bytes | None) -> Item:
        request = tracked.request
        feature = request.mm_features[index]
        name = encoder_hash(
            tracked.namespace, feature.identifier, lora_digest=lora, salt=request.cache_salt
        )
        embeds = request.get_num_encoder_embeds(index)
        output, width = None, self._form.width(feature.modality)
        if width is not None and embeds > 0:
            output = Output(tracked.namespace, name, embeds, width, self._form.dtype)
            if output.layer.nbytes > self._form.item_bytes_max:
                self._recorder.count("load_oversized")
                output = None
        return Item(feature.identifier, name, embeds, 0, output)
