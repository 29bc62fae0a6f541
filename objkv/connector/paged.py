"""A rank's paged cache as vLLM registers it, group by group, checked before anything is trusted."""

from collections.abc import Mapping

import torch

from objkv.connector.geometry import Geometry
from objkv.errors import ConfigError
from objkv.transfer.lanes import open_lane
from objkv.transfer.paging import NOT_QUANTISED, PagedGroup, Quantised
from objkv.transfer.selftest import check_pages


def read_pages(
    geometry: Geometry,
    ranks: tuple[int, int],
    kv_caches: Mapping[str, torch.Tensor],
    quantised: Mapping[str, Quantised] = NOT_QUANTISED,
) -> dict[int, PagedGroup]:
    """The groups that this rank has layers of. ``ranks``: TP and PP. Writes to free blocks, and
    puts back what was there. Raises ``ConfigError`` for a layout that objkv cannot use."""
    groups = {}
    for g in range(len(geometry.groups)):
        shape = geometry.shape(g, *ranks)
        if shape is None:
            continue  # no layer of it in this stage of the pipeline
        if missing := [name for name in shape.layers if name not in kv_caches]:
            raise ConfigError(f"vLLM registered no KV cache for {missing[0]}: objkv cannot save it")
        caches = [kv_caches[name] for name in shape.layers]
        groups[g] = PagedGroup(shape, caches, quantised)
        check_pages(groups[g], open_lane(groups[g].device))
    return groups
