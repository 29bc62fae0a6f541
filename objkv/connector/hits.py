"""Where the tokens of requests came from: the replica itself, the hot store, the bulk store, or
nowhere, so that they are computed. Counted when vLLM gives a request its blocks.
"""

from typing import TYPE_CHECKING

from objkv.telemetry import Recorder
from objkv.transfer.plan import LoadPlan

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Hits:
    """The scheduler's thread only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._asked: dict[str, int] = {}

    def asked(self, request_id: str, computed: int) -> None:
        """vLLM has ``computed`` tokens of a request, and asks for more. It may ask often."""
        self._asked[request_id] = computed

    def given(self, request: "Request") -> None:
        """vLLM gave a request blocks. After a load between steps it does so again without asking:
        that is the same query. Source: vLLM 0.31-0.33, ``v1/core/sched/scheduler.py``."""
        computed = self._asked.pop(request.request_id, None)
        if computed is None:
            return
        self._recorder.count("queries")
        self._recorder.count("query_tokens", request.num_tokens)
        self._recorder.count("local_hit_tokens", computed)

    def planned(self, plan: LoadPlan, start: int, end: int) -> None:
        """Tokens ``[start, end)`` of a request are to be loaded."""
        cold: set[tuple[int, int]] = set()
        chunks: set[tuple[int, int]] = set()
        for load in plan.moves:
            span = (max(start, load.move.token_start), min(end, load.move.token_end))
            chunks.add(span)
            if not all(record.hot for _, record in load.records):
                cold.add(span)  # what one of its groups has in bulk comes no sooner
        hot = sum(last - first for first, last in chunks - cold)
        self._recorder.count("hits")
        self._recorder.count("hit_tokens", end - start)
        self._recorder.count("hit_hot_tokens", hot)
        self._recorder.count("hit_bulk_tokens", end - start - hot)

    def ended(self, request_id: str) -> None:
        """A request ended, maybe before it was given blocks."""
        self._asked.pop(request_id, None)
