"""What one replica encoded another is given, the same bytes; and who shares with whom."""

from time import time
from typing import Any

import pytest
import torch

from objkv.cache.bulk_index import BulkIndex
from objkv.cache.switch import Switch, set_switch
from objkv.keys.encoder import encoder_hash, encoder_key
from objkv.keys.identity import identity_path
from tests.connector.encoder.world import (
    EMBEDS,
    IDENTITY,
    WIDTH,
    Place,
    Replica,
    output_of,
    replica,
    request,
    saved,
)
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_store import MemoryStore
from tests.index.flaky_index import FlakyIndex
from tests.support.waiting import wait_until


@pytest.mark.parametrize("codec", ["none", "blosc"])
def test_a_folder_that_is_its_own_index(codec: str) -> None:
    """It tells nothing of what follows an output that it does not have, and no codec."""
    store = FlakyStore(MemoryStore())
    place = Place(store, FlakyIndex(BulkIndex(store)))
    with replica(place, codec=codec) as first:
        first.see(request("a", "x", "y"))
    with replica(place) as second:
        assert second.see(request("b", "new", "x", "newer", "y")) == ["new", "newer"]
        for name in ("x", "y"):
            assert torch.equal(second.cache[name], output_of(name))
    with replica(place, form={"width": lambda modality: 1}) as narrow:
        assert narrow.see(request("c", "x")) == ["x"]
        assert narrow.count("load_refused") == 1
    with replica(place) as third:
        assert third.see(request("d", "x")) == []


def test_what_vllm_holds_itself_is_not_asked_for(place: Place, second: Replica) -> None:
    saved(place, "x")
    second.see(request("b", "x"))
    calls = len(place.store.calls)
    assert second.side.is_ready(request("c", "x"), 0)
    second.step()
    assert len(place.store.calls) == calls
    second.dropped("x")
    assert second.see(request("d", "x")) == []


def test_outputs_that_vllm_dropped_are_not_loaded_later(place: Place, second: Replica) -> None:
    """Of a step that no worker looked at: what it would load is of the old weights."""
    saved(place, "x")
    seen = request("b", "x")
    second.wait(seen)
    assert second.side.has_item("x")
    second.side.allocate(seen, 0)
    assert second.plan(0).loads
    second.side.outputs_dropped()
    assert not second.plan(1).loads
    asked = place.index.calls.count("find")
    second.wait(request("c", "x"))
    assert place.index.calls.count("find") > asked, "what vLLM dropped is asked for"
    assert second.see(request("c", "x")) == ["x"]


def test_a_preempted_request_asks_for_its_image_again(place: Place) -> None:
    """vLLM has freed it meanwhile, and another replica or this one has saved it."""
    with replica(place) as first:
        alone, shared = request("a", "x"), request("b", "x", "y")
        assert first.see(alone) == ["x"]
        assert first.see(shared) == ["y"]
        first.dropped("x", "y")
        assert first.see(shared) == []
        assert first.see(alone) == []
        assert first.saved == 2
        first.dropped("x", "y")
        assert first.see(shared) == []
        assert first.fetcher.held_bytes == 0


def test_a_replica_that_only_encodes_leaves_out_what_is_stored(place: Place) -> None:
    saved(place, "x")
    with replica(place, loads=False) as producer:
        seen = request("a", "x", "y")
        assert producer.see(seen) == ["y"]
        assert producer.see(request("b", "x", "y")) == []
        assert (producer.count("hits"), producer.saved) == (1, 1)
        assert producer.count("loads") == 0
    with replica(place) as second:
        assert second.see(request("c", "x", "y")) == []


def test_images_that_the_kv_covers_are_not_asked_for(place: Place, second: Replica) -> None:
    saved(place, "x", "y")
    assert second.side.is_ready(request("b", "x", "y"), 100)
    seen = request("c", "x", "y")
    second.wait(seen, 9)
    assert not second.side.has_item("x")
    assert second.side.has_item("y")


@pytest.mark.parametrize("loads", [True, False])
def test_nothing_stored_is_used_while_an_operator_says_so(place: Place, *, loads: bool) -> None:
    saved(place, "x", "y")
    with replica(place, loads=loads) as second:
        assert second.see(request("b", "x")) == []
        set_switch(place.store, Switch("never", None, int(time()) + 3600, 0, "me"))
        second.side.switch.start()
        wait_until(lambda: second.side.switch.mode == "never")
        assert second.see(request("c", "y")) == ["y"]
        assert second.saved == 0


def test_the_identity_document_is_stored_beside_the_outputs(place: Place) -> None:
    saved(place, "x")
    namespace = IDENTITY.namespace()
    assert place.store.get(identity_path(namespace)) == IDENTITY.canonical()
    assert place.payloads() == [encoder_key(namespace, encoder_hash(namespace, "x")).path()]


def test_salts_do_not_share(place: Place, second: Replica) -> None:
    saved(place, "x", cache_salt="a")
    assert second.see(request("b", "x", cache_salt="b")) == ["x"]
    second.dropped("x")
    assert second.see(request("c", "x", cache_salt="a")) == []


def test_a_promise_is_of_the_request_that_vllm_looks_at(place: Place, second: Replica) -> None:
    """It names only the identifier, which another request may use under another salt."""
    saved(place, "x", cache_salt="a")
    salted, other = request("b", "x", cache_salt="a"), request("c", "x", cache_salt="b")
    second.wait(salted)
    second.wait(other)
    assert not second.side.has_item("x")
    second.wait(salted)
    assert second.side.has_item("x")
    assert not second.side.has_item("y")
    second.plan(1)
    assert not second.side.has_item("x"), "of no request that it was asked about in this step"


@pytest.mark.parametrize(
    ("form", "of_request", "payloads"),
    [
        # Sessions get images later, and without its caches vLLM only numbers images.
        ({}, {"resumable": True}, 0),
        ({"media_named": False}, {}, 0),
        # An adapter may change what is seen, but where none does, requests share with everybody.
        ({"tower_lora": True}, {"lora_request": "ada"}, 0),
        ({"tower_lora": True}, {}, 1),
        ({}, {"lora_request": "ada"}, 1),
    ],
)
def test_what_has_no_name_of_its_own_is_left_alone(
    place: Place, form: dict[str, Any], of_request: dict[str, Any], payloads: int
) -> None:
    with replica(place, form=form) as first:
        assert first.see(request("a", "x", **of_request)) == ["x"]
        assert first.see(request("b", "x", **of_request)) == []  # vLLM's own
    assert len(place.payloads()) == payloads
    with replica(place) as second:
        assert second.see(request("c", "x")) == (["x"] if payloads == 0 else [])


def test_after_a_reset_nothing_old_is_loaded_and_nothing_new_is_shared(
    place: Place, second: Replica
) -> None:
    saved(place, "x", "y")
    under_way = request("b", "x")
    second.wait(under_way)
    before = second.side.namespace.name
    assert second.side.reset()
    assert second.side.namespace.name != before
    second.wait(under_way)
    assert not second.side.has_item("x")
    assert second.see(request("c", "y")) == ["y"]
    with replica(place) as third:
        assert third.see(request("d", "y")) == []
        assert torch.equal(third.cache["y"], output_of("y"))
    assert second.fetcher.held_bytes == 0


@pytest.mark.parametrize(
    "form",
    [
        {"dtype": "F32"},
        {"width": lambda modality: WIDTH // 2},
        {"width": lambda modality: None},
        {"item_bytes_max": 2 * EMBEDS * WIDTH - 1},
    ],
)
def test_an_output_of_another_form_is_not_promised(place: Place, form: dict[str, Any]) -> None:
    """And not held against who stored it, if only this replica expects something else."""
    saved(place, "x")
    with replica(place, form=form) as second:
        assert second.see(request("b", "x")) == ["x"]
    with replica(place) as third:
        assert third.see(request("c", "x")) == []


@pytest.mark.parametrize("other_holds", [False, True])
def test_another_number_of_rows_is_not_given_what_is_stored_or_another_request_holds(
    place: Place, second: Replica, *, other_holds: bool
) -> None:
    """A client may give one name to several images, and a worker could not add what vLLM relied
    on."""
    saved(place, "x")
    if other_holds:
        second.wait(request("b", "x"))
    second.wait(request("c", "x", embeds=EMBEDS + 1))
    assert not second.side.has_item("x")
