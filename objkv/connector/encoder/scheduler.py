"""The scheduler's side of the encoder cache. An output is promised only while it is verified and
held in this process's memory, and is sent with the plan of the step that needs it, so no agent can
break a promise, and all ranks get the same bytes. Source of the call order: vLLM 0.32-0.33,
``_try_schedule_encoder_inputs`` in ``v1/core/sched/scheduler.py``."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from objkv.cache.admission import Mode
from objkv.cache.switch import AdmissionSwitch
from objkv.connector.encoder.fetch import EncoderFetcher, State
from objkv.connector.encoder.items import (
    EncoderOutput,
    EncoderPlan,
    EncoderReport,
    Item,
    OutputForm,
    Pages,
)
from objkv.connector.guard import guarded
from objkv.connector.namespace import ReplicaNamespace
from objkv.connector.pacing import EmptySteps
from objkv.keys.encoder import EncoderIdentity, encoder_hash
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder, added

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LOCAL_MAX = 16_384
"""Most names of vLLM's own outputs to remember. A forgotten one may be loaded needlessly."""


@dataclass(slots=True)
class _Tracked:
    """One request with media. ``request`` is owned by vLLM and never changed here."""

    request: "Request"
    end: int
    """Tokens up to the end of its last item. Nothing beyond it is loaded or saved."""
    items: dict[str, Item]
    """Items by identifier."""


class EncoderSchedulerSide:
    """The scheduler's half of the encoder cache. For the scheduler's thread only."""

    adapters: ClassVar[None] = None
    """Outputs that adapters change are not shared."""

    def __init__(
        self,
        form: OutputForm,
        identity: EncoderIdentity,
        fetcher: EncoderFetcher,
        *,
        loads: bool,
        saves: bool,
        steps: EmptySteps,
        bulk: WriteStore,
        admission: Mode,
        recorder: MemoryRecorder,
    ) -> None:
        """``loads``, ``saves``: whether this replica does."""
        self._fetcher, self._recorder, self._steps = fetcher, recorder, steps
        self._loads_any, self._saves_any = loads, saves
        self._reported: dict[str, float] = {}
        self._form = form
        self._tracked: dict[str, _Tracked] = {}
        self._asking: _Tracked | None = None
        """The request of vLLM's last query. Later queries name only an item, not its request."""
        self._promised: dict[tuple[str, str], EncoderOutput] = {}
        self._loads: dict[str, tuple[EncoderOutput, Pages]] = {}
        self._saves: dict[str, EncoderOutput] = {}
        self._local: dict[str, None] = {}
        """Known identifiers in vLLM's own encoder cache, the oldest first."""
        self.namespace = ReplicaNamespace(identity, bulk, fetcher.submit, writes=saves)
        self.switch = AdmissionSwitch(admission, bulk, self.namespace, recorder, fetcher.submit)
        self.switch.start()
        self.namespace.announce()
        logger.info(
            "objkv encoder cache ready model=%s namespace=%s", identity.model, self.namespace.name
        )

    def is_ready(self, request: "Request", computed: int) -> bool:
        """Whether all stored outputs that the request still needs are held or have failed, after
        the deadline at the latest. For a replica that only encodes: whether it is known which are
        stored. vLLM calls it in a hot loop, also for generating requests."""
        self._asking = None
        tracked = self._asking = self._track(request)
        if computed >= tracked.end or not self._asks:
            self._fetcher.queue.pop(request.request_id, None)  # those behind it need not wait
            return True
        needed = [
            item.output
            for identifier, item in tracked.items.items()
            if item.end > computed and item.output.width and identifier not in self._local
        ]
        return self._fetcher.want(request.request_id, needed)

    def has_item(self, identifier: str) -> bool:
        """Whether an item's output is held, for the request of the last ``is_ready``. True is a
        promise for this step: the output stays held until it is taken. For a replica that only
        encodes: whether it is stored, and need not be encoded."""
        tracked = self._asking
        self._local.pop(identifier, None)  # vLLM does not query for outputs that it has
        if tracked is None or (item := tracked.items.get(identifier)) is None:
            return False
        state = self._fetcher.state(item.output)
        if not self._loads_any:
            return state is State.STORED
        if state is not State.HELD or not self._asks:
            return False
        self._promised[tracked.request.request_id, identifier] = item.output
        return True

    def allocate(self, request: "Request", index: int) -> None:
        """Plan the load of a promised output, or the save of one that is encoded in this step. vLLM
        has allocated its place. Raises only if a promised output cannot be provided."""
        identifier = request.mm_features[index].identifier
        output = self._promised.pop((request.request_id, identifier), None)
        self._local[identifier] = None
        if len(self._local) > _LOCAL_MAX:  # even if vLLM does not report freed outputs
            del self._local[next(iter(self._local))]
        if identifier in self._loads:
            return
        if output is None:
            self._plan_save(request, identifier)
            return
        self._loads[identifier] = output, self._fetcher.pop_pages(output)
        self._recorder.count("hits")

    def plan_step(self, output: "SchedulerOutput") -> EncoderPlan:
        """Return the plan of everything that the workers do in this step."""
        for identifier in output.free_encoder_mm_hashes:
            self._local.pop(identifier, None)
            self._loads.pop(identifier, None)
        plan = EncoderPlan(self._loads.copy(), self._saves)
        self._saves = {}
        self._promised.clear()
        self._asking = None
        computes = bool(output.total_num_scheduled_tokens)
        if computes:  # otherwise workers may ignore the plan
            self._loads.clear()
        else:
            self._fetcher.wait(self._steps.wait_s)
        self._steps.planned(busy=computes)
        return plan

    def update(self, output: "ECConnectorOutput") -> None:
        """Process the workers' reports."""
        if isinstance(report := output.ec_connector_worker_meta, EncoderReport):
            self._reported = added(self._reported, report.numbers)

    def finish(self, request: "Request") -> None:
        """Forget a request that ended, possibly while it waited."""
        if (tracked := self._tracked.pop(request.request_id, None)) is not None:
            self._drop(tracked)

    @property
    def _asks(self) -> bool:
        """Whether stored outputs are used at all."""
        return self.switch.mode != "never"

    def reset(self, *, clean: bool = True) -> bool:
        """Stop using everything stored so far. Requests in progress no longer load or save.
        ``clean`` has no effect: outputs are saved only when they are encoded, and vLLM does not
        query for outputs that it has. See ``ReplicaNamespace.renew``."""
        for tracked in self._tracked.values():
            self._drop(tracked)
        self._promised.clear()
        return self.namespace.renew(clean=True)

    def outputs_dropped(self) -> bool:
        """``reset``, because vLLM dropped its own outputs, as it does when weights changed."""
        self._local.clear()
        self._loads.clear()
        return self.reset()

    def take_numbers(self) -> dict[str, float]:
        """Return the numbers of this side and the workers since the last call."""
        reported, self._reported = self._reported, {}
        return added(reported, self._recorder.drain())

    def close(self) -> None:
        """Stop the background threads."""
        self._fetcher.close()

    def _track(self, request: "Request") -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self.namespace.announce()
            places = (feature.mm_position for feature in request.mm_features)
            end = max((place.offset + place.length for place in places), default=0)
            tracked = _Tracked(request, end, self._items(request, self.namespace.name))
            self._tracked[request.request_id] = tracked
        return tracked

    def _items(self, request: "Request", namespace: str) -> dict[str, Item]:
        """Return a request's items by identifier, none if they must not be shared."""
        if not self._form.media_named or request.resumable:
            return {}  # a resumable session may get more images later
        if self._form.tower_lora and request.lora_request is not None:
            return {}
        items: dict[str, Item] = {}
        for index, feature in enumerate(request.mm_features):
            place, identifier = feature.mm_position, feature.identifier
            end = place.offset + place.length
            if (known := items.get(identifier)) is None:
                name = encoder_hash(namespace, identifier, salt=request.cache_salt)
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

    def _drop(self, tracked: _Tracked) -> None:
        """Forget a request's items. It loads and saves nothing from now on."""
        outputs = (item.output for item in tracked.items.values())
        self._fetcher.drop(tracked.request.request_id, outputs)
        tracked.items = {}

    @guarded(None)
    def _plan_save(self, request: "Request", identifier: str) -> None:
        """Plan the save of an output that is encoded, unless it is stored."""
        item = self._track(request).items.get(identifier)
        if item is None:
            return
        state = self._fetcher.state(item.output)
        self._fetcher.forget(item.output)  # if vLLM drops its own, it is asked for again
        if state is not State.STORED and self._saves_any:
            self._saves[identifier] = item.output
        elif not self._loads_any:
            self._recorder.count("hits")
