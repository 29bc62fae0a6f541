"""One answer of many ranks: yes only where each of them says yes.

Ranks of one tensor-parallel group compute together, so that one that left the forward pass out
while another did not would leave that other waiting for ever. Of V1 engines vLLM asks this itself:
``KVOutputAggregator`` counts what the workers tell, and objkv's workers all tell everything.
"""

import logging
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from objkv.errors import ConfigError

logger = logging.getLogger(__name__)


class Agreement(Protocol):
    """Asks the ranks that compute together. All of them must ask, equally often."""

    def __call__(self, mine: bool) -> bool:
        """Whether all say yes. Waits for the others, within a bound; never raises."""


def alone(mine: bool) -> bool:
    """The agreement of a rank that computes by itself."""
    return mine


class RankAgreement:
    """Over a process group of its own. Whoever did not hear from the others says no from then on,
    because nobody can tell any more who answers which question."""

    def __init__(self, group: "dist.ProcessGroup") -> None:
        """``group``: gloo, with the bound as its timeout; used for nothing else."""
        self._group = group
        self._broken = False

    def __call__(self, mine: bool) -> bool:
        """See ``Agreement``."""
        if self._broken:
            return False
        answer = torch.tensor([mine], dtype=torch.int32)
        try:
            dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        except Exception as exc:  # whatever the backend raises: a rank is gone, or very late
            self._broken = True
            logger.warning("ranks out of touch, computing everything from now on reason=%s", exc)
            return False
        return bool(answer.item())


def open_agreement(rank: int, tp_size: int, *, timeout_s: float) -> Agreement:
    """The agreement of ``rank``'s tensor-parallel group: ``tp_size`` ranks that follow each other.

    Every rank of the world must call it, in the same order among its collective calls. Raises
    ``ConfigError`` without torch's process groups.
    """
    if tp_size == 1:
        return alone
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size={tp_size}: initialize torch.distributed before the connector, "
            "its ranks must agree on what they leave out"
        )
    world = dist.get_world_size()
    if world % tp_size or not 0 <= rank < world:
        raise ConfigError(f"rank {rank} of {world} has no group of {tp_size} ranks")
    mine = None
    for first in range(0, world, tp_size):
        ranks = list(range(first, first + tp_size))
        # Each group is made by all ranks of the world, also those outside.
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend="gloo")
        if rank in ranks:
            mine = group
    assert mine is not None
    return RankAgreement(mine)
