"""One load under way: which moves are done, which failed, and the fence around its blocks.

The fence is the whole point: bytes are written into blocks only between ``enter`` and ``leave``,
and after ``close`` returns nothing is, or ever will be, written by this job. So blocks may change
hands as soon as a job is closed.
"""

from collections.abc import Callable
from threading import Condition

from objkv.transfer.lanes import Mark
from objkv.transfer.plan import LoadMove, LoadOutcome, LoadPlan


class LoadJob:
    """State of one plan on one worker. Safe from many threads."""

    def __init__(
        self,
        plan: LoadPlan,
        layers: dict[int, int],
        deadline: float,
        clock: Callable[[], float],
    ) -> None:
        self.plan = plan
        self.deadline = deadline
        """On ``clock``; what is not loaded by then is a miss."""
        self.started = clock()
        self._clock = clock
        self._changed = Condition()
        self._unfinished = set(range(len(plan.moves)))
        self._layers_done = [0] * len(plan.moves)
        self._layers = [layers[load.move.group] for load in plan.moves]
        self._marks: dict[tuple[int, int], Mark] = {}
        self._failed_chunk: int | None = None
        self._rejected: set[tuple[str, bytes]] = set()
        self._writing = 0
        self._closed = False

    def wanted(self, index: int) -> bool:
        """Whether move ``index`` is still worth fetching: no earlier chunk failed, not closed."""
        with self._changed:
            return self._wanted(self.plan.moves[index])

    def enter(self, index: int) -> bool:
        """Ask to write move ``index`` into its blocks; after True, ``leave`` must follow."""
        with self._changed:
            if not self._wanted(self.plan.moves[index]):
                return False
            self._writing += 1
            return True

    def layer_written(self, index: int, layer: int, mark: Mark) -> None:
        """Layer ``layer`` of move ``index`` was given to the lane, up to ``mark``."""
        with self._changed:
            self._layers_done[index] = layer + 1
            self._marks[index, layer] = mark
            self._changed.notify_all()

    def leave(self, index: int, *, complete: bool) -> None:
        """The write that ``enter`` allowed is over. ``complete``: every layer was verified and is
        in its blocks; this is the only way for a move to succeed."""
        with self._changed:
            self._writing -= 1
            if complete:
                self._unfinished.discard(index)
            self._changed.notify_all()

    def fail(self, index: int, *, rejected: bool) -> None:
        """Move ``index`` was not, and will not be, loaded; later chunks are useless without it."""
        with self._changed:
            move = self.plan.moves[index].move
            self._fail_from(move.chunk)
            if rejected:
                self._rejected.add((self.plan.namespace, move.prefix_hash))
            self._unfinished.discard(index)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Nobody needs it any more: what is not written by now counts as failed."""
        with self._changed:
            self.deadline = self._clock()
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether every move has succeeded or failed, or the deadline has passed."""
        with self._changed:
            return not self._unfinished or self._clock() >= self.deadline

    def wait_layer(self, group: int, layer: int) -> list[Mark]:
        """Block until layer ``layer`` of ``group`` was given to the lane for every move that is
        still wanted, or the deadline has passed; the marks to order computing after.

        A move that lacks the layer then has failed: the layer is computed without it, whatever a
        write under way still brings.
        """
        with self._changed:
            while self._lacks_layer(group, layer):
                left = self.deadline - self._clock()
                if left <= 0 or not self._changed.wait(left):
                    break
            for i, load in enumerate(self.plan.moves):
                if load.move.group == group and self._layers_done[i] <= layer:
                    self._fail_from(load.move.chunk)
            return [
                self._marks[i, layer]
                for i, load in enumerate(self.plan.moves)
                if load.move.group == group and (i, layer) in self._marks
            ]

    def close(self) -> LoadOutcome:
        """Forbid further writes, wait for those under way (copies, not the network), report."""
        with self._changed:
            self._closed = True
            while self._writing:
                self._changed.wait()
            self._changed.notify_all()
            return LoadOutcome(
                self.plan.request_id, self._failed_blocks(), frozenset(self._rejected)
            )

    def _fail_from(self, chunk: int) -> None:
        if self._failed_chunk is None or chunk < self._failed_chunk:
            self._failed_chunk = chunk

    def _wanted(self, load: LoadMove) -> bool:
        if self._closed or self._clock() >= self.deadline:
            return False
        return self._failed_chunk is None or load.move.chunk < self._failed_chunk

    def _lacks_layer(self, group: int, layer: int) -> bool:
        return not self._closed and any(
            self._layers_done[i] <= layer and i in self._unfinished and self._wanted(load)
            for i, load in enumerate(self.plan.moves)
            if load.move.group == group
        )

    def _failed_blocks(self) -> frozenset[int]:
        first = self._failed_chunk
        for i in self._unfinished:
            chunk = self.plan.moves[i].move.chunk
            first = chunk if first is None else min(first, chunk)
        if first is None:
            return frozenset()
        return frozenset(
            block
            for load in self.plan.moves
            if load.move.chunk >= first
            for block in load.move.block_ids
        )
