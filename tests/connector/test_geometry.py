"""How the groups of a model are known to payloads, and what ranks hold of them."""

from objkv.connector.model.groups import Geometry
from objkv.keys.identity import GroupIdentity

LAYERS = ("l0", "l1")
FULL = GroupIdentity("full", None, LAYERS, heads=4, content=8, block_size=32)
LATENT = GroupIdentity("mla", None, LAYERS, heads=1, content=8, block_size=32)
WINDOW = GroupIdentity("sliding_window", 48, LAYERS, heads=4, content=8, block_size=32)
LOCAL = GroupIdentity("chunked_local", 128, LAYERS, heads=4, content=8, block_size=32)


def geometry(*groups: GroupIdentity, canonical: bool) -> Geometry:
    return Geometry(groups, 64, 32, tp_size=2, canonical=canonical)


def test_only_groups_that_keep_all_tokens_forget_their_block_size() -> None:
    stored = geometry(FULL, LATENT, WINDOW, LOCAL, canonical=True).stored_groups
    assert [group.block_size for group in stored] == [1, 1, 32, 32]
    shapes = [
        geometry(FULL, LATENT, WINDOW, LOCAL, canonical=True).shape(group, 0) for group in range(4)
    ]
    assert [shape.divisible for shape in shapes if shape] == [True, True, False, False]


def test_where_pages_are_the_kernels_own_no_group_does() -> None:
    one = geometry(FULL, LATENT, canonical=False)
    assert one.stored_groups == one.groups
    assert not any(shape.divisible for g in range(2) if (shape := one.shape(g, 0)))


def test_a_rank_knows_the_layers_and_heads_of_all() -> None:
    two = Geometry((FULL,), 64, 32, tp_size=2, stages=((1, 1),))
    shape = two.shape(0, 1, 1)
    assert shape is not None
    assert shape.layers == ("l1",)
    assert shape.model_layers == LAYERS
    assert shape.heads == 4
    assert str(shape.rank_shard.shard) == "L1-2_H2-4"
