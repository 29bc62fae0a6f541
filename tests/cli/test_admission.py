"""``objkv admission``: orders to running replicas."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from objkv.cache.switch import SWITCH_PATH, AdmissionSwitch
from objkv.telemetry import NullRecorder
from tests.cli.conftest import Machine, Run
from tests.support.samples import NAMESPACE, TOKENS
from tests.support.steps import complete


def followed(machine: Machine, namespace: str = NAMESPACE) -> Any:
    """The order that a replica of ``namespace`` follows after its next reading."""
    ours = SimpleNamespace(name=namespace)
    switch = AdmissionSwitch("auto", machine.bulk, ours, NullRecorder(), lambda job: True)
    complete(switch.read())
    return None if switch.mode == "auto" else switch.mode


def test_an_order_reaches_the_fleet_until_it_is_cleared(machine: Machine, run: Run) -> None:
    machine.fill()
    assert "each replica's own settings decide" in run("admission").out
    ran = run("admission", "never", "--for", "2h")
    assert ran.code == 0
    assert "all replicas: admission is never until" in ran.out
    assert "within a minute" in ran.out
    assert followed(machine) == "never"
    assert re.search(r"[12] h left", run("admission").out)
    assert "admission is never" in run("doctor").out
    run("admission", "clear")
    assert followed(machine) is None
    assert "admission is" not in run("doctor").out


def test_an_order_for_one_namespace_leaves_the_others_alone(machine: Machine, run: Run) -> None:
    machine.fill()
    run("admission", "never", "-n", NAMESPACE[:8])
    assert (followed(machine), followed(machine, "b" * 32)) == ("never", None)
    run("admission", "always")
    assert (followed(machine), followed(machine, "b" * 32)) == ("never", "always")
    assert len(run("admission", "--json").document["orders"]) == 2
    run("admission", "clear", "-n", NAMESPACE[:8])
    assert followed(machine) == "always"


def test_the_document_says_who_and_until_when(
    machine: Machine, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "\udcffme")  # not UTF-8
    machine.fill()
    [order] = run("admission", "never", "--for", "90s", "--json").document["orders"]
    assert order["until_s"] - order["created_s"] == 90
    assert order["by"].startswith("me@")
    stored = json.loads(machine.bulk.get(SWITCH_PATH) or b"")
    assert stored["switches"] == [order]


@pytest.mark.parametrize("how", [(), ("--explain",)])
def test_a_match_names_the_order_and_serves_nothing(
    machine: Machine, run: Run, how: tuple[str, ...]
) -> None:
    machine.fill()
    run("admission", "never")
    ran = run("match", *how, stdin=json.dumps(list(TOKENS)))
    assert "nothing is loaded now: admission is never" in ran.out
    assert "\n0 of 48 tokens would be served" in ran.out


def test_neither_an_audit_nor_a_sweep_calls_the_order_foreign(machine: Machine, run: Run) -> None:
    machine.fill()
    run("admission", "never")
    assert not any(
        "not created by objkv" in one for one in run("audit", "--json").document["problems"]
    )
    assert run("sweep", "--apply", "--force", "--grace", "0").code == 0
    assert followed(machine) == "never"
