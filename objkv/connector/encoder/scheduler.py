"""The scheduler's side of the encoder cache: it promises outputs and plans loads and saves.

An output is promised only while it is verified and held in this process's memory. It is sent with
the plan of the step that needs it. Workers fetch nothing, so no agent can break a promise, and all
ranks get the same bytes. Never waits for one. Source of the call order: vLLM 0.32-0.33,
``_try_schedule_encoder_inputs`` in ``v1/core/sched/scheduler.py``.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from objkv.cache.admission import Mode
from objkv.cache.switch import AdmissionSwitch
from objkv.connector.encoder.fetch import EncoderFetcher, State
from objkv.connector.encoder.items import (
    EncoderPlan,
    EncoderReport,
    Item,
    ItemLoad,
    ItemSave,
    ItemTracker,
    OutputForm,
    TrackedMedia,
)
from objkv.connector.guard import guarded
from objkv.connector.model.adapters import Adapters
from objkv.connector.namespace import ReplicaNamespace
from objkv.connector.pacing import EmptySteps
from objkv.keys.encoder import EncoderIdentity
from objkv.stores.base import WriteStore
from objkv.telemetry import MemoryRecorder, added

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_LOCAL_MAX = 16_384
"""Most names of vLLM's own outputs to remember. A forgotten one may be loaded needlessly."""


@dataclass(frozen=True, slots=True)
class EncoderRoles:
    """The roles of this replica."""

    loads: bool
    saves: bool
    steps_in_flight: int = 1
    """How many steps may be scheduled before the first one ends."""
    has_peers: bool = False
    """See ``EmptySteps``."""


class EncoderSchedulerSide:
    """The scheduler's half of the encoder cache. All methods are called by the scheduler's
    thread."""

    def __init__(
        self,
        roles: EncoderRoles,
        form: OutputForm,
        identity: EncoderIdentity,
        fetcher: EncoderFetcher,
        *,
        bulk: WriteStore,
        admission: Mode = "always",
        recorder: MemoryRecorder,
    ) -> None:
        self._roles, self._fetcher, self._recorder = roles, fetcher, recorder
        self._steps = EmptySteps(roles.steps_in_flight, has_peers=roles.has_peers)
        self._reported: dict[str, float] = {}
        # No adapter is read if adapters do not change encoder outputs.
        self.adapters = Adapters(fetcher.submit if form.tower_lora else _do_nothing)
        self._items = ItemTracker(form, self.adapters, recorder)
        self._asking: TrackedMedia | None = None
        """The request of vLLM's last query. Later queries name only an item, not its request."""
        self._promised: dict[tuple[str, str], Item] = {}
        self._loads: dict[str, ItemLoad] = {}
        self._saves: dict[str, ItemSave] = {}
        self._local: dict[str, None] = {}
        """Known identifiers in vLLM's own encoder cache, the oldest first."""
        self._namespace = ReplicaNamespace(identity, bulk, fetcher.submit, writes=roles.saves)
        self.switch = AdmissionSwitch(admission, bulk, self._namespace, recorder, fetcher.submit)
        self.switch.start()
        self._namespace.announce()
        logger.info(
            "objkv encoder cache ready model=%s namespace=%s", identity.model, self._namespace.name
        )

    @property
    def namespace(self) -> str:
        """The current namespace. ``reset`` changes it."""
        return self._namespace.name

    def is_ready(self, request: "Request", computed: int) -> bool:
        """Whether all stored outputs that the request still needs are held or have failed. For a
        replica that only encodes: whether it is known which are stored.

        vLLM calls it in a hot loop, also for generating requests. True after the deadline at the
        latest.
        """
        self._asking = None
        tracked = self._asking = self._track(request)
        if computed >= tracked.end or not self._asks:
            return True
        if not self._items.name(tracked):
            return self._fetcher.is_late(tracked.deadline)
        needed = [
            item.output
            for item in tracked.items.values()
            if item.end > computed and item.output and item.identifier not in self._local
        ]
        name = request.request_id
        if not all(self._fetcher.is_wanted(name, output) for output in needed):
            # New, or preempted since: it queues for memory with all that it needs, and holds none.
            for output in needed:
                self._fetcher.drop(name, output)
            self._fetcher.want(name, needed)
        return not any(self._fetcher.state(output) is State.WAITING for output in needed)

    def has_item(self, identifier: str) -> bool:
        """Whether an item's output is held, for the request of the last ``is_ready``.

        True is a promise for this step: the output stays held until it is taken. A replica that
        only encodes puts nothing into vLLM's cache, and need not encode what is stored.
        """
        tracked = self._asking
        self._local.pop(identifier, None)  # vLLM does not query for outputs that it has
        item = None if tracked is None else tracked.items.get(identifier)
        if tracked is None or item is None:
            return False
        state = self._state(item)
        if not self._roles.loads:
            return state is State.STORED
        if state is not State.HELD or not self._asks:
            return False
        self._promised[tracked.request.request_id, identifier] = item
        return True

    def allocate(self, request: "Request", index: int) -> None:
        """Plan the load of a promised output, or the save of one that is encoded in this step.

        vLLM has allocated its place. Raises only if a promised output cannot be provided. A failed
        save raises nothing.
        """
        identifier = request.mm_features[index].identifier
        item = self._promised.pop((request.request_id, identifier), None)
        self._note_local(identifier)
        if identifier in self._loads:
            return
        if item is None:
            self._plan_save(request, identifier)
            return
        assert item.output is not None
        pages = self._fetcher.take(item.output)
        self._loads[identifier] = ItemLoad(identifier, item.output, pages)
        self._recorder.count("hits")

    def plan_step(self, output: "SchedulerOutput") -> EncoderPlan:
        """Return the plan of everything that the workers do in this step."""
        for identifier in output.free_encoder_mm_hashes:
            self._local.pop(identifier, None)
            self._loads.pop(identifier, None)
        plan = EncoderPlan(self.namespace, tuple(self._loads.values()), self._saves)
        self._saves = {}
        self._promised.clear()
        self._asking = None
        computes = bool(output.total_num_scheduled_tokens)
        if computes:  # otherwise workers may ignore the plan
            self._loads = {}
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
        if (tracked := self._items.end(request.request_id)) is not None:
            self._drop(request.request_id, tracked.items.values())

    @property
    def _asks(self) -> bool:
        """Whether stored outputs are used at all."""
        return self.switch.mode != "never"

    @property
    def open(self) -> bool:
        """Whether requests may load and save."""
        return self._namespace.open

    def reset(self, *, clean: bool = True) -> bool:
        """Stop using everything stored so far. Requests in progress no longer load or save.

        ``clean`` has no effect: outputs are saved only when they are encoded, and vLLM does not
        query for outputs that it has. See ``ReplicaNamespace.renew``.
        """
        for request_id, items in self._items.distrust():
            self._drop(request_id, items)
        self._promised.clear()
        return self._namespace.renew(clean=True)

    def outputs_dropped(self) -> bool:
        """Record that vLLM dropped all of its own outputs, as it does when weights changed, and
        ``reset``."""
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

    def _track(self, request: "Request") -> TrackedMedia:
        tracked = self._items.get(request.request_id)
        if tracked is None:
            self._namespace.announce()
            tracked = self._items.add(request, self.namespace, self._fetcher.deadline())
        return tracked

    def _state(self, item: Item) -> State:
        return State.ABSENT if item.output is None else self._fetcher.state(item.output)

    def _drop(self, request_id: str, items: Iterable[Item]) -> None:
        for item in items:
            if item.output is not None:
                self._fetcher.drop(request_id, item.output)

    def _note_local(self, identifier: str) -> None:
        self._local.pop(identifier, None)
        self._local[identifier] = None
        if len(self._local) > _LOCAL_MAX:  # even if vLLM does not report freed outputs
            del self._local[next(iter(self._local))]

    @guarded(None)
    def _plan_save(self, request: "Request", identifier: str) -> None:
        """Plan the save of an output that is encoded, unless it is stored."""
        tracked = self._track(request)
        if not self._items.name(tracked) or (item := tracked.items.get(identifier)) is None:
            return
        state = self._state(item)
        if item.output is not None:  # if vLLM drops its own, it is asked for again
            self._fetcher.forget(item.output)
        if state is not State.STORED and self._roles.saves:
            self._saves[identifier] = ItemSave(item.item_hash, item.embeds)
        elif not self._roles.loads:
            self._recorder.count("hits")


def _do_nothing(_job: Callable[[], object]) -> bool:
    return False
