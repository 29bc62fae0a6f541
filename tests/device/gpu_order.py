"""Shows that loads and saves are ordered with a model's kernels on a device.

``python -m tests.device.gpu_order KIND WAY`` runs all scenarios on a device (see ``open_device``),
which reads the node agent's memory in one of ``WAYS``. Each makes one side of an edge between
streams slow, and compares all bytes.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch

from tests.device import simulated
from tests.device.devices import SIMULATED, Verdict, open_device, report, tried
from tests.device.ordering import loads, saves, steps
from tests.device.ordering.rig import REGISTERED, Delay, OrderRig, Scenario, Setup

SCENARIOS: Final = (*loads.SCENARIOS, *saves.SCENARIOS, *steps.SCENARIOS)
_MATRIX: Final = 4096
_PRODUCTS: Final = 8


def run_scenarios(
    device: torch.device,
    *,
    scenarios: Iterable[Scenario] = SCENARIOS,
    delay: Delay | None = None,
    seed: int = 0,
    patience_s: float | None = None,
    way: str = REGISTERED,
) -> Iterator[Verdict]:
    """Run scenarios on ``device``, which nothing else may use meanwhile. ``delay``: keeps a stream
    busy, by default by matrix products. ``patience_s``: instead of each scenario's."""
    delay = delay or busy_kernel(device)
    for scenario in scenarios:
        setup = replace(scenario.setup, way=way)
        if patience_s is not None:
            setup = replace(setup, patience_s=patience_s)

        def run(scenario: Scenario = scenario, setup: Setup = setup) -> bool:
            with OrderRig(device, delay, setup, seed) as one:
                return scenario.run(one)

        found = tried(f"{way}, {scenario.name}", run)
        if not found.is_right and not found.fault:
            found = replace(found, fault=" ".join((scenario.run.__doc__ or "").split()))
        yield found


def busy_kernel(device: torch.device) -> Delay:
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


def main(kind: str, way: str) -> int:
    device = open_device(kind)
    delay = simulated_delay if kind == SIMULATED else None
    return report(run_scenarios(device, delay=delay, way=way))


def simulated_delay(stream: Any, seconds: float) -> None:
    with torch.get_device_module(SIMULATED).stream(stream):
        simulated.sleep(round(seconds * 1e6))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
