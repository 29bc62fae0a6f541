"""Which chunks a step completes, and what of them is still to be saved.

A chunk is looked at once, in the step that completes it: a window's blocks and a state may be gone
by the next. Source: vLLM 0.31-0.33, ``kv_connector_block_state`` of ``v1/core/sched/output.py``.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from objkv.config import Config
from objkv.connector.admissions import Admissions
from objkv.connector.geometry import Geometry
from objkv.connector.steps import Computed, save_moves, states_after
from objkv.connector.tracking import RequestTracker, Tracked
from objkv.transfer.plan import SavePlan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Saves:
    """The scheduler's thread only; never waits."""

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        requests: RequestTracker,
        admissions: Admissions,
        *,
        loads: bool,
    ) -> None:
        """``loads``: whether this replica loads as well, and so looks prompts up in any case."""
        self._config = config
        self._geometry = geometry
        self._requests = requests
        self._admissions = admissions
        self._loads = loads

    def plan(self, output: "SchedulerOutput") -> Iterator[SavePlan]:
        """What this step completes of each request, as far as it is to be saved."""
        size, with_decode = self._geometry.chunk_tokens, self._config.save_decode
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._requests.get(request_id)
            if tracked is None or not tracked.may_save:
                continue
            request = tracked.request
            # Only tokens whose ids are known and that the model accepted: with asynchronous
            # scheduling and speculation more may be computed than that.
            known = len(request.all_token_ids) if with_decode else request.num_prompt_tokens
            computed = min(request.num_computed_tokens + scheduled, known) // size
            # First what holds in nearly every step, of hundreds of requests that generate.
            if computed <= tracked.planned and not tracked.again:
                continue
            if not self._admissions.trusts(tracked):
                continue
            if not self._loads and not tracked.records:
                self._requests.records(tracked)
            again = frozenset(tracked.again)
            chunks = self._requests.due(tracked, computed)
            if chunks and (plan := self._plan(output, tracked, chunks, again)) is not None:
                tracked.saved = True
                yield plan

    def _plan(
        self, output: "SchedulerOutput", tracked: Tracked, chunks: list[int], again: frozenset[int]
    ) -> SavePlan | None:
        request = tracked.request
        assert tracked.hashes is not None
        moves = save_moves(
            self._geometry,
            tracked.hashes.chain,
            self._computed(output, tracked),
            chunks,
            keep_tokens=self._config.store_tokens,
            is_stored=self._stored(tracked, again),
        )
        if not moves:
            return None
        return SavePlan(request.request_id, tracked.namespace, tuple(moves))

    def _computed(self, output: "SchedulerOutput", tracked: Tracked) -> Computed:
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

    def _stored(self, tracked: Tracked, again: frozenset[int]) -> Callable[[int, int], bool]:
        """Of chunks that lack a group, the others may be stored. What was found of ``again`` is not
        believed any more: it was not there, or not right."""

        def is_stored(chunk: int, group: int) -> bool:
            if chunk in again or chunk >= len(tracked.records):
                return False
            shards = tracked.records[chunk]
            return shards is not None and self._requests.reach.is_readable(shards, group)

        return is_stored
