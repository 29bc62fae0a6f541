"""Stages of a pipeline: which layers vLLM gives them, and that all ranks mean the same groups."""

from itertools import product

import pytest
from vllm.distributed.utils import get_pp_indices

from objkv.keys.ranks import Topology, pp_layers


def test_layers_are_dealt_to_stages_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for layers, pp_size in product(range(1, 130), range(1, 9)):
        topology = Topology(1, 1, pp_layers(layers, pp_size))
        ranges = [get_pp_indices(layers, rank, pp_size) for rank in range(pp_size)]
        assert [topology.layer_range(rank) for rank in range(pp_size)] == ranges
