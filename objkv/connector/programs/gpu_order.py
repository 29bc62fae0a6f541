"""Shows that loads and saves are ordered with a model's kernels on a device.

``python -m objkv.connector.programs.gpu_order KIND EVERY own`` runs all scenarios, or one of so
many, and prints a JSON line for each, see ``open_device``. Each makes one side of an edge between
streams slow, and compares all bytes. With one of ``WAYS`` instead of ``own`` the worker loads and
saves by a node agent, and there are more scenarios.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from objkv.connector.programs.devices import open_device, simulated_controls
from objkv.connector.programs.ordering import agent, loads, saves, steps
from objkv.connector.programs.ordering.rig import Delay, OrderRig, Scenario
from objkv.ops.bench.gpu import SIMULATED
from objkv.ops.gpu_check.check import WAYS

SCENARIOS: Final = (*loads.SCENARIOS, *saves.SCENARIOS, *steps.SCENARIOS)
_MATRIX: Final = 4096
_PRODUCTS: Final = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a scenario."""

    name: str
    description: str
    is_right: bool
    """Whether all bytes were right, and no wait took too long."""
    fault: str
    """The exception that ended the scenario, or empty."""
    seconds: float


def run_scenarios(
    device: torch.device,
    *,
    scenarios: Iterable[Scenario] = SCENARIOS,
    delay: Delay | None = None,
    seed: int = 0,
    patience_s: float | None = None,
    rig: type[OrderRig] | None = None,
) -> Iterator[Verdict]:
    """Run scenarios on ``device``, which nothing else may use meanwhile.

    Args:
        scenarios: the scenarios to run.
        delay: keeps a stream busy. By default by matrix products.
        seed: of random choices.
        patience_s: bound of each wait, instead of that of each scenario.
        rig: the kind of rig, by default one whose worker loads for itself.
    """
    rig = rig or OrderRig
    delay = delay or busy_kernel(device)
    for scenario in scenarios:
        setup = scenario.setup
        if patience_s is not None:
            setup = replace(setup, patience_s=patience_s)
        started = time.monotonic()
        is_right, fault = False, ""
        try:
            with rig(device, delay, setup, seed) as one:
                is_right = scenario.run(one)
        except Exception as exc:
            fault = f"{type(exc).__name__}: {exc}".splitlines()[0]
        seconds = time.monotonic() - started
        yield Verdict(scenario.name, scenario.description, is_right and not fault, fault, seconds)


def busy_kernel(device: torch.device) -> Delay:
    """Return a function that keeps a stream of ``device`` busy for a given time."""
    if device.type == "cpu":
        return lambda stream, seconds: None
    api = torch.get_device_module(device)
    # Few large products, because a device accepts only about a thousand launches in advance.
    operand = torch.randn(2 * (_MATRIX,), device=device)

    def work(products: int) -> None:
        for _ in range(products):
            torch.mm(operand, operand)

    with torch.accelerator.device_index(device.index or 0):
        work(_PRODUCTS)  # without the time to load the kernel
        rate = _PRODUCTS / _seconds(api, device, lambda: work(_PRODUCTS))

    def delay(stream: Any, seconds: float) -> None:
        with api.stream(stream):
            work(max(1, round(seconds * rate)))

    return delay


def _seconds(api: Any, device: torch.device, work: Callable[[], object]) -> float:
    api.synchronize(device)
    started = time.perf_counter()
    work()
    api.synchronize(device)
    return time.perf_counter() - started


def main() -> None:
    """Run all scenarios and print their results. Prints nothing without a device of this kind."""
    device = open_device(sys.argv[1])
    if device is None:
        return
    delay = None
    if device.type == SIMULATED:
        delay = _simulated_delay
        torch.set_num_threads(1)  # PyTorch's own threads would take the cores of its streams
    every, way = int(sys.argv[2]), sys.argv[3]
    scenarios, rig = SCENARIOS[::every], None
    if way in WAYS:
        scenarios, rig = (*agent.SCENARIOS, *scenarios), agent.agent_rig(way)
    for verdict in run_scenarios(device, scenarios=scenarios, delay=delay, rig=rig):
        print(json.dumps(asdict(verdict)), flush=True)


def _simulated_delay(stream: Any, seconds: float) -> None:
    with torch.get_device_module(SIMULATED).stream(stream):
        simulated_controls().sleep(round(seconds * 1e6))


if __name__ == "__main__":
    main()
