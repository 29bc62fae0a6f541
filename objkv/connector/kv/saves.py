"""Plans the saves of each step: which chunks it completes, and whose blocks may be saved."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from objkv.config import Config
from objkv.connector.guard import guarded
from objkv.connector.kv.planning import Computed, save_moves, states_after
from objkv.connector.kv.requests import RequestTracker, TrackedRequest
from objkv.connector.model.groups import Geometry
from objkv.transfer.plan import SavePlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


class BlockTrust:
    """Decides whose blocks may be saved. For the scheduler's thread only. A load within the step
    may still fail, which is known only after its step and the steps scheduled in the meantime.
    Until then, blocks allocated in these steps may contain anything. A worker does not see the
    outcome of other ranks' loads, and under ``MultiConnector`` another connector may load. Source:
    vLLM 0.31-0.33, ``v1/core/sched/scheduler.py``, where blocks loaded within a step are in the
    prefix cache before they are filled."""

    def __init__(self, steps_in_flight: int, *, ranks: int = 1) -> None:
        self._steps_in_flight, self._ranks = steps_in_flight, ranks
        self._step = self._no_saves_before_step = 0
        self._admitted: list[TrackedRequest] = []

    def add(self, tracked: TrackedRequest) -> None:
        """Record that vLLM allocated blocks to the request, in a step that is being scheduled."""
        # No save reads these blocks yet. If the request ends while they are being filled, only the
        # load keeps them, because vLLM does not expect the end of a save too.
        tracked.saved = False
        self._admitted.append(tracked)

    def next_step(self, output: "SchedulerOutput | None") -> None:
        """Record that a step was scheduled with the requests added since the previous one. None:
        not in full, so blocks allocated in it, or before its result is known, are not trusted."""
        admitted, self._admitted = self._admitted, []
        self._step += 1
        if output is None:
            self._no_saves_before_step = self._step + self._steps_in_flight + 1
        elif output.has_sync_kv_loads and (
            self._ranks > 1
            # Another connector has filled some of its blocks.
            or any(one.request.num_computed_tokens > one.accounted for one in admitted)
        ):
            self._no_saves_before_step = self._step + self._steps_in_flight
        if self._step < self._no_saves_before_step:
            for tracked in admitted:
                tracked.no_saves_before_step = self._no_saves_before_step

    def trusts(self, tracked: TrackedRequest) -> bool:
        """Whether the contents of the request's blocks after this step may be saved."""
        return self._step >= tracked.no_saves_before_step


_FEW_TOKENS = 16
"""A request that gets more tokens in a step, as prompts do, is examined in that step. Without
speculation a request that generates gets one."""


class DueSaves:
    """Finds the requests that may complete a chunk in a step, without examining the others:
    hundreds generate at once, and each completes a chunk once in hundreds of steps. For the
    scheduler's thread only. A request's computed tokens grow in each step by no more than the most
    that any request got. One that lacks n tokens is therefore due when the sum of these has grown
    by n: usually exactly then, and after rejected tokens or a preemption too early, so that it is
    examined once more. vLLM sets the computed tokens forward otherwise only when it admits a
    request, see ``add``. Source: vLLM 0.31-0.33, ``num_computed_tokens``."""

    def __init__(self, requests: RequestTracker) -> None:
        self._requests = requests
        self._growth = self._entries = 0
        self._queue: list[tuple[int, int, str]] = []
        """A heap of (when due, number of the entry, request id). Entries outlive their requests,
        whose tokens and images may be large."""
        self._valid: dict[str, int] = {}
        """Number of each queued request's entry. Entries with other numbers are outdated."""

    def add(self, tracked: TrackedRequest, lacking: int = 0) -> None:
        """Examine a request when it may have ``lacking`` more computed tokens."""
        name = tracked.request.request_id
        self._entries += 1
        self._valid[name] = self._entries
        heappush(self._queue, (self._growth + lacking, self._entries, name))

    def pop_due(self, scheduled: Mapping[str, int], total: int) -> list[TrackedRequest]:
        """Return the requests that may be due in a step that computes these tokens, ``total`` of
        all requests. They are not examined again before they are added again."""
        due = list[TrackedRequest]()
        # Each of them gets one token at least. Usually none gets more, and nothing is searched.
        most = total - max(0, len(scheduled) - 1)
        if most > _FEW_TOKENS:
            most = max(scheduled.values())
        if most > _FEW_TOKENS:
            for name, count in scheduled.items():
                if count > _FEW_TOKENS and (tracked := self._requests.get(name)) is not None:
                    self._valid.pop(name, None)
                    due.append(tracked)
        self._growth += min(most, _FEW_TOKENS)
        while self._queue and self._queue[0][0] <= self._growth:
            _, number, name = heappop(self._queue)
            if self._valid.get(name) == number:
                del self._valid[name]
                if (tracked := self._requests.get(name)) is not None:
                    due.append(tracked)
        return due


_GAPS_MAX = 65_536
"""Gaps to remember, 100 bytes each. vLLM has long evicted the blocks of older ones."""


class DraftGaps:
    """Decides whether a request's draft KV may be stored. For the scheduler's thread only. A
    replica with the draft also loads what replicas without it store, and zeroes the draft's blocks.
    The output does not change, because the target decides on every proposed token. But what the
    draft computes afterwards depends on those zeros, also in requests that find the blocks in
    vLLM's own prefix cache. None of it may be stored, or every replica would load it."""

    def __init__(self, geometry: Geometry) -> None:
        self._chunk_tokens = geometry.chunk_tokens
        self._gaps: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of prefixes, in chunks. After each of them the draft's KV may be missing."""

    def lost(self, tracked: TrackedRequest, end: int) -> None:
        """Record a load without the draft's KV of tokens from ``end`` on."""
        assert tracked.hashes is not None
        tracked.draft_complete = False
        prefix = tracked.hashes.chain.parent(end // self._chunk_tokens)
        self._gaps[prefix] = None
        self._gaps.move_to_end(prefix)
        while len(self._gaps) > _GAPS_MAX:
            self._gaps.popitem(last=False)

    def is_complete(self, tracked: TrackedRequest, chunk: int) -> bool:
        """Whether the draft's KV of a chunk, whose hash is computed, depends on no gap."""
        if not tracked.draft_complete or not self._gaps:
            return tracked.draft_complete
        assert tracked.hashes is not None
        # Chunks that vLLM had, the last in part.
        local = -(-tracked.local_tokens // self._chunk_tokens)
        before = map(tracked.hashes.chain.parent, range(min(chunk + 1, local)))
        return not any(prefix in self._gaps for prefix in before)


class SavePlanner:
    """Plans the saves of the chunks that each step completes. For the scheduler's thread only.
    Never waits. Each chunk is considered once, in the step that completes it, because a window's
    blocks and a state may be gone in the next step. Source: vLLM 0.31-0.33,
    ``kv_connector_block_state`` of ``v1/core/sched/output.py``."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        requests: RequestTracker,
        trust: BlockTrust,
        *,
        loads: bool,
    ) -> None:
        """``loads``: whether this replica also loads, so that every prompt is looked up anyway."""
        self._config, self._geometry, self._loads = config, geometry, loads
        self._requests, self._trust, self._due = requests, trust, DueSaves(requests)
        self.drafts = DraftGaps(geometry)
        self._number = 0

    def add(self, tracked: TrackedRequest) -> None:
        """Examine a request in the next step: it is admitted, or chunks are saved again."""
        self._due.add(tracked)

    @guarded(())
    def plan(self, output: "SchedulerOutput") -> tuple[SavePlan, ...]:
        """Return the save plans of the chunks that this step completes, one per request."""
        plans = []
        scheduled, total = output.num_scheduled_tokens, output.total_num_scheduled_tokens
        for tracked in self._due.pop_due(scheduled, total):
            try:
                plan = self._plan_due(output, tracked)
            except Exception:  # only this request is not saved
                logger.exception("not saved request=%s", tracked.request.request_id)
                tracked.may_save = False
                continue
            if plan is not None:
                tracked.saved = True
                plans.append(plan)
        return tuple(plans)

    def _plan_due(self, output: "SchedulerOutput", tracked: TrackedRequest) -> SavePlan | None:
        """Return the save plan of one request, if any, and queue it for its next chunk."""
        if not tracked.may_save:
            return None
        request, size = tracked.request, self._geometry.chunk_tokens
        scheduled = output.num_scheduled_tokens.get(request.request_id)
        proposed = output.scheduled_spec_decode_tokens.get(request.request_id, ())
        computed = request.num_computed_tokens + (scheduled or 0) - len(proposed)
        # Only tokens that have ids and that the model accepted. With asynchronous scheduling
        # and speculation, tokens of earlier steps may be rejected as well.
        with_decode = self._config.save_decode
        known = len(request.all_token_ids) if with_decode else request.num_prompt_tokens
        if (most := tracked.limits.save_tokens_max) is not None:
            known = min(known, most)
        chunks: list[int] = []
        again = frozenset(tracked.again)
        if scheduled is not None and self._trust.trusts(tracked):
            whole = min(computed, known) // size
            if whole > tracked.planned or again:
                if not self._loads and not tracked.records:
                    self._requests.records(tracked)
                chunks = self._requests.due(tracked, whole)
        following = (tracked.planned + 1) * size
        if tracked.again:
            self._due.add(tracked)
        elif with_decode or following <= known:
            # If the chunk is computed already, it lacks a hash, an id or trust: examine it again.
            self._due.add(tracked, max(0, following - computed))
        if not chunks:
            return None
        assert tracked.hashes is not None
        moves = save_moves(
            self._geometry,
            tracked.hashes.chain,
            self._computed(output, tracked),
            chunks,
            keep_tokens=self._config.store_tokens,
            is_stored=partial(self._is_stored, tracked, again),
            again=again,
        )
        # What only some nodes hold back, the others cannot load.
        name, puts = request.request_id, tracked.limits.puts or self._geometry.nodes > 1
        if not moves:
            return None
        self._number += 1
        return SavePlan(name, tracked.namespace, tuple(moves), puts, self._number)

    def _computed(self, output: "SchedulerOutput", tracked: TrackedRequest) -> Computed:
        request, state = tracked.request, output.kv_connector_block_state
        assert state is not None
        blocks = state.get_block_ids(request.request_id)
        assert blocks is not None
        end = None
        if request.request_id not in output.scheduled_spec_decode_tokens:
            end = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
        offered = getattr(state, "boundary_state_offloads", {})  # not every version has it
        states = states_after(self._geometry, blocks, end, offered.get(request.request_id, ()))
        return Computed(request.all_token_ids, blocks, states)

    def _is_stored(
        self, tracked: TrackedRequest, again: frozenset[int], chunk: int, group: int
    ) -> bool:
        """Whether a group of a chunk is stored. Those ``again`` are not, whatever their records."""
        if self._geometry.is_draft(group) and not self.drafts.is_complete(tracked, chunk):
            return True  # it may not be stored
        if chunk in again or chunk >= len(tracked.records):
            return False
        shards = tracked.records[chunk]
        return shards is not None and self._requests.payloads.is_readable(shards, group)


class BlockHeadroom:
    """Predicts whether the next step may write blocks that saves of running requests still read.

    Model runners that zero and copy blocks before they pass on which requests a step preempts must
    wait for saves one step earlier. vLLM preempts a request only if a running one needs more blocks
    than are free, and only running requests take blocks of preempted ones in the same step. Between
    steps blocks only become free. So a step preempts none if as many are free before it as all
    running requests could need. A reset of the prefix cache preempts all, whatever is free, but
    leaves no prefix to copy, so that only matters if blocks are zeroed. Source: vLLM 0.31-0.33,
    ``schedule`` and ``reset_prefix_cache`` in ``v1/core/sched/scheduler.py``, ``update_requests``
    in ``v1/worker/gpu/model_runner.py``.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        geometry: Geometry,
        manager: Callable[[], "KVCacheManager | None"],
    ) -> None:
        """``manager``: returns vLLM's manager, or None until the connector is bound to it."""
        self._manager = manager
        # Windows drop blocks and states are overwritten in any step, without any preemption.
        self._always = geometry.windowed or getattr(kv_cache_config, "needs_kv_cache_zeroing", True)
        limits, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        ahead = 0 if speculative is None else speculative.num_speculative_tokens or 0
        # For each request one block for the first token, and blocks for tokens that it may skip.
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._needed = sum(
            -(-limits.max_num_batched_tokens // size)
            + limits.max_num_seqs * (1 + -(-ahead // size))
            for size in sizes
        )

    @guarded(True)
    def is_short(self) -> bool:
        """Whether the next step may preempt a request, or this is unknown."""
        manager = None if self._always else self._manager()
        return manager is None or manager.block_pool.get_num_free_blocks() < self._needed
