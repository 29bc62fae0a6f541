"""Mutants, each objkv without one ordering edge; ``mutants.toml`` says what finds them.

``python -m tests.device.mutants`` tries the scenario of each on the simulated device, and prints
in which round it found the mutant, as a table in Markdown.
"""

import importlib
import inspect
import logging
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.device import simulated
from tests.device.gpu_order import SCENARIOS, run_scenarios, simulated_delay
from tests.device.ordering.rig import REGISTERED, Scenario

CATALOGUE = Path(__file__).with_suffix(".toml")
PATIENCE_S = 4.0
"""For mutants that make something wait for ever."""
ROUNDS = 12
"""How often a scenario is tried against a mutant. One or two are enough on a quiet machine."""
SLOWNESS_MAX = 3.0
"""With longer delays, a worker that closes would rightly wait no more."""
ATTEMPT_S = 0.3
"""How long the device is busy where something must not wait for it."""
DELAY_US_MAX = 500
"""The longest random delay of an operation on a stream."""
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@dataclass(frozen=True)
class Edit:
    """Replaces text in the source of a function."""

    place: str
    """``module:function`` or ``module:Class.function``, in ``objkv``."""
    find: str
    replace: str = "pass"
    """By default the statement that is found is removed."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        module_name, _, path = self.place.partition(":")
        module = importlib.import_module(f"objkv.{module_name}")
        owner: Any = module
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = inspect.getattr_static(owner, name)
        text = textwrap.dedent(inspect.getsource(original))
        assert self.find in text, f"{self.place} no longer contains: {self.find}"
        scope: dict[str, Any] = {}
        edited = text.replace(self.find, self.replace)
        exec(compile(edited, f"<mutant of {self.place}>", "exec"), vars(module), scope)  # noqa: S102  # our own code
        with patch.object(owner, name, scope[name]):
            yield


@dataclass(frozen=True)
class Mutant:
    """The edge that is missing, and who finds that."""

    name: str
    edits: tuple[Edit, ...]
    scenario: str = ""
    """Of the simulated device."""
    way: str = REGISTERED
    """How the device reads the agent's memory in that scenario."""
    situation: str = ""
    """Of the fences."""
    world: str = "slow"
    """Where that situation is played."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.applied())
            yield


def read_mutants() -> tuple[Mutant, ...]:
    found = []
    for entry in tomllib.loads(CATALOGUE.read_text())["mutant"]:
        keys = entry.keys() & {"place", "find", "replace"}
        edits = entry.pop("edits", None) or [{key: entry.pop(key) for key in keys}]
        found.append(Mutant(edits=tuple(Edit(**edit) for edit in edits), **entry))
    return tuple(found)


MUTANTS = read_mutants()


def play(scenario: Scenario, way: str, seed: int) -> str:
    """Run a scenario on the simulated device, whose streams are slow at random. Returns why it
    failed, or "" if all bytes were right."""
    device = torch.device("sim:0")
    simulated.reset()
    simulated.seed(seed)
    simulated.slow(device, 0, DELAY_US_MAX)
    simulated.DRIVER.use_batch_copy(scenario.setup.layout.contiguous)
    (verdict,) = run_scenarios(
        device, scenarios=(scenario,), delay=simulated_delay, seed=seed, way=way
    )
    fault = simulated.take_error()
    simulated.reset()
    if fault:
        return f"the device reports: {fault}"
    return "" if verdict.is_right else verdict.fault or "wrong bytes"


def rounds_to_find(mutant: Mutant) -> int:
    """Return in which round its scenario finds a mutant, 0 if it never does."""
    scenario = BY_NAME[mutant.scenario]
    setup = replace(scenario.setup, patience_s=PATIENCE_S, attempts_s=(ATTEMPT_S,))
    with mutant.applied():
        for number in range(ROUNDS):
            slower = replace(setup, slowness=min(1 + number / 4, SLOWNESS_MAX))
            if play(replace(scenario, setup=slower), mutant.way, number):
                return number + 1
    return 0


def main() -> int:
    """Print a line for each mutant. Returns the number of those that their scenario missed."""
    simulated.load()
    logging.disable(logging.CRITICAL)
    print("| without this edge | scenario | way | rounds |\n| --- | --- | --- | --: |")
    missed = 0
    for one in MUTANTS:
        if one.scenario:
            rounds = rounds_to_find(one)
            missed += not rounds
            print(f"| {one.name} | {one.scenario} | {one.way} | {rounds} |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
