from objkv.keys.states import PartView, SplitState


def test_a_ranks_parts_lie_where_its_page_has_them() -> None:
    """Of two ranks: rows of 4 split and 2 shared float32, then a row of 8 split bfloat16."""
    state = SplitState.parse("mamba split float32:2x4+2* bfloat16:1x8")
    assert state is not None
    assert (state.units, state.unit_bytes) == (4, 28)
    assert state.views(2) == (
        PartView(offset=0, heads=2, rows=2, nbytes=4, head_stride=4, row_stride=16),
        PartView(offset=8, heads=2, rows=2, nbytes=8, head_stride=0, row_stride=16),
        PartView(offset=32, heads=2, rows=1, nbytes=4, head_stride=4, row_stride=8),
    )
