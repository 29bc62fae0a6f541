from types import SimpleNamespace
from typing import Any, cast

from objkv.connector.kv.planning import BlockTrust
from objkv.connector.kv.requests import TrackedRequest


def request(*, computed: int, accounted: int) -> TrackedRequest:
    of_vllm = cast("Any", SimpleNamespace(num_computed_tokens=computed))
    return TrackedRequest(of_vllm, "n" * 32, accounted=accounted)


def step(admissions: BlockTrust, *admitted: TrackedRequest, sync: bool) -> None:
    for tracked in admitted:
        admissions.add(tracked)
    admissions.next_step(cast("Any", SimpleNamespace(has_sync_kv_loads=sync)))


def test_what_objkv_loads_within_a_step_is_not_doubted() -> None:
    admissions, own = BlockTrust(1), request(computed=512, accounted=512)
    step(admissions, own, sync=True)
    assert admissions.trusts(own)


def test_with_several_ranks_what_objkv_loads_within_a_step_is_doubted_as_well() -> None:
    """A rank whose load succeeded does not know that another's failed, and would save the rest."""
    admissions, own = BlockTrust(1, ranks=2), request(computed=512, accounted=512)
    step(admissions, own, sync=True)
    assert not admissions.trusts(own)
    step(admissions, sync=False)
    assert admissions.trusts(own)


def test_saves_of_blocks_that_a_preemption_took_do_not_hold_the_new_ones() -> None:
    """An aborted load ends on its own; told twice that its blocks are free, vLLM stops."""
    admissions, resumed = BlockTrust(1), request(computed=0, accounted=0)
    resumed.saved = True
    admissions.add(resumed)
    assert not resumed.saved


def test_blocks_that_another_connector_fills_are_doubted_until_its_step_is_over() -> None:
    admissions, theirs = BlockTrust(1), request(computed=512, accounted=0)
    step(admissions, theirs, sync=True)
    assert not admissions.trusts(theirs)
    step(admissions, sync=False)
    assert admissions.trusts(theirs)


def test_requests_that_may_share_such_blocks_are_doubted_with_them() -> None:
    admissions = BlockTrust(2)
    running, theirs = request(computed=64, accounted=64), request(computed=512, accounted=0)
    beside, next_one = request(computed=256, accounted=256), request(computed=256, accounted=256)
    step(admissions, running, sync=False)
    step(admissions, theirs, beside, sync=True)
    step(admissions, next_one, sync=False)
    assert [admissions.trusts(x) for x in (running, theirs, beside, next_one)] == [
        True,
        False,
        False,
        False,
    ]
    step(admissions, sync=False)
    assert all(admissions.trusts(x) for x in (theirs, beside, next_one))


def test_what_another_connector_brought_between_steps_is_trusted() -> None:
    admissions, theirs = BlockTrust(1), request(computed=512, accounted=0)
    step(admissions, theirs, sync=False)
    assert admissions.trusts(theirs)
