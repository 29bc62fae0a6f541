"""An operator's switch goes before the settings, ends by itself, and never harms a replica."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from objkv.background import Steps
from objkv.cache.admission import AdmissionPolicy, ChunkSize
from objkv.cache.switch import (
    SWITCH_PATH,
    AdmissionSwitch,
    Switch,
    clear_switch,
    in_force,
    read_switches,
    set_switch,
)
from objkv.errors import ConfigError, PayloadError, StoreUnavailable
from objkv.telemetry import MemoryRecorder
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_store import MemoryStore
from tests.support.steps import complete

NOW_S = 1_800_000_000
OURS, THEIRS = "a" * 32, "b" * 32


def order(mode: Any = "never", namespace: str | None = None, lasts_s: int = 3600) -> Switch:
    return Switch(mode, namespace, NOW_S + lasts_s, NOW_S, "ops@desk")


def replica(bulk: Any, clock: ManualClock | None = None) -> tuple[AdmissionSwitch, MemoryRecorder]:
    recorder = MemoryRecorder()
    ours = SimpleNamespace(name=OURS)
    clock = clock or ManualClock(NOW_S)

    def submit(job: Callable[[], Steps[None]]) -> bool:
        complete(job())
        return True

    return AdmissionSwitch("always", bulk, ours, recorder, submit, clock=clock), recorder


def test_an_order_is_followed_until_its_end_and_goes_before_the_settings() -> None:
    bulk, clock = MemoryStore(), ManualClock(NOW_S)
    switch, recorder = replica(bulk, clock)
    policy = AdmissionPolicy(lambda: switch.mode, recorder)
    chunks = [ChunkSize(1000, 256, "bulk")]
    complete(switch.read())
    assert (switch.mode, policy.admit(chunks)) == ("always", 1)

    set_switch(bulk, order("never"))
    assert policy.admit(chunks) == 1  # not read yet
    complete(switch.read())
    assert (switch.mode, policy.admit(chunks)) == ("never", 0)
    assert recorder.value("admission_switched") == 1

    clock.advance(3600)
    assert (switch.mode, policy.admit(chunks)) == ("always", 1)
    complete(switch.read())
    assert recorder.value("admission_switched") == 0


def test_an_order_for_a_namespace_goes_before_that_for_the_fleet() -> None:
    bulk = MemoryStore()
    set_switch(bulk, order("never"))
    set_switch(bulk, order("always", THEIRS))
    switch, _ = replica(bulk)
    complete(switch.read())
    assert switch.mode == "never"
    set_switch(bulk, order("auto", OURS))
    complete(switch.read())
    assert switch.mode == "auto"
    assert len(read_switches(bulk)) == 3
    clear_switch(bulk, OURS, now_s=NOW_S)
    clear_switch(bulk, None, now_s=NOW_S)
    complete(switch.read())
    assert switch.mode == "always"
    assert [one.namespace for one in read_switches(bulk)] == [THEIRS]


def test_a_later_order_replaces_an_earlier_one_and_ended_ones_go() -> None:
    bulk = MemoryStore()
    for one in (order("never", THEIRS, lasts_s=-10), order("never"), order("always")):
        set_switch(bulk, one)
    assert read_switches(bulk) == (order("always"),)
    assert in_force(read_switches(bulk), OURS, now_s=NOW_S) == order("always")


def test_without_an_answer_the_last_order_stays_in_force_until_its_end() -> None:
    bulk, clock = FlakyStore(MemoryStore()), ManualClock(NOW_S)
    set_switch(bulk, order("never"))
    switch, recorder = replica(bulk, clock)
    complete(switch.read())
    bulk.fail_until_mended(StoreUnavailable("down"))
    complete(switch.read())
    assert switch.mode == "never"
    assert recorder.value("admission_switch_errors") == 1
    clock.advance(3600)
    complete(switch.read())
    assert switch.mode == "always"


DOCUMENT = {"format": 1, "switches": [{
    "mode": "never", "namespace": None, "until_s": NOW_S + 60, "created_s": NOW_S, "by": "x"
}]}  # fmt: skip


def changed(**values: Any) -> bytes:
    return json.dumps(DOCUMENT | {"switches": [DOCUMENT["switches"][0] | values]}).encode()  # type: ignore[index]  # JSON


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        b'{"format": 2, "switches": []}',
        b'{"format": 1, "switches": 7}',
        b'{"format": 1, "switches": [{}]}',
        json.dumps(DOCUMENT | {"switches": DOCUMENT["switches"] * 201}).encode(),  # type: ignore[operator]  # JSON
        changed(mode="sometimes"),
        changed(mode=["never"]),
        changed(until_s="soon"),
        changed(until_s=1 << 60),
        changed(until_s=True),
        changed(namespace=7),
        changed(namespace="a" * 10_000),
        changed(by="a" * 10_000),
        changed(by=None),
        changed(extra=1),
        changed(namespace=["a"]),
        changed(by=["a"]),
    ],
)
def test_a_document_that_objkv_did_not_write_orders_nothing(document: bytes) -> None:
    bulk = MemoryStore()
    bulk.put(SWITCH_PATH, document)
    with pytest.raises(PayloadError):
        read_switches(bulk)
    switch, recorder = replica(bulk)
    complete(switch.read())
    assert switch.mode == "always"
    assert recorder.value("admission_switch_errors") == 1
    set_switch(bulk, order("never"))  # and an operator's next order replaces it
    complete(switch.read())
    assert switch.mode == "never"


def test_more_orders_than_replicas_read_are_refused_and_control_characters_left_out() -> None:
    bulk = MemoryStore()
    bulk.put(SWITCH_PATH, changed(by="\x1b[31mops\n"))
    assert [one.by for one in read_switches(bulk)] == ["[31mops"]
    clear_switch(bulk, None, now_s=NOW_S)
    for number in range(200):
        by = "\N{SNOWMAN}" * 200
        set_switch(bulk, replace(order("never", f"{number:0200d}"), by=by))
    assert len(read_switches(bulk)) == 200
    with pytest.raises(ConfigError, match="more than 200"):
        set_switch(bulk, order("never"))
    set_switch(bulk, order("always", f"{7:0200d}"))
    assert len(read_switches(bulk)) == 200


def test_a_started_switch_reads_at_once_and_when_it_is_asked_after_a_while() -> None:
    bulk, clock = MemoryStore(), ManualClock(NOW_S)
    set_switch(bulk, order("never"))
    switch, _ = replica(bulk, clock)
    switch.start()
    assert switch.mode == "never"
    clear_switch(bulk, None, now_s=NOW_S)
    clock.advance(19)
    assert switch.mode == "never"
    clock.advance(1)
    assert switch.mode == "always"
