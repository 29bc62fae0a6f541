"""The device of ``objkv gpu-check``, and the self-test of lanes, on the simulated device."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import FORMS, ORDERS, GpuAnswer, rows_of
from objkv.programs import gpu_facts
from objkv.transfer.devices import add_driver
from objkv.transfer.lanes import PagedLayers, Recast
from tests.device import self_test
from tests.device.self_test import LaneCase, run_self_test


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's own threads would take the cores of the device's streams."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_layout_is_right_in_every_way(sim: ModuleType) -> None:
    sim.slow("sim", 0, 300)
    sim.DRIVER.use_batch_copy(True)
    cases = list(run_self_test(torch.device("sim", 0)))
    assert not [case for case in cases if case.ok is False]
    tested = {case.name.partition(": ")[2] for case in cases if case.ok}
    assert tested == {
        "the driver's kernels",
        "PyTorch's kernels",
        "batches of copies",
        "check at start",
    }


class Wrong:
    """A driver of the simulated device that does one thing wrong."""

    def __init__(self, sim: ModuleType, fault: str) -> None:
        self._right, self._fault = sim.DRIVER.kernels, fault
        self.kernels, self.event, self.pin = self, sim.DRIVER.event, sim.DRIVER.pin
        self.pin_read_only = sim.DRIVER.pin_read_only
        self.batch_copy = None
        if fault == "batch":
            sim.DRIVER.use_batch_copy(True)
            right = sim.DRIVER.batch_copy
            self.batch_copy = lambda src, dst, sizes, any_order: right(
                src[1:], dst[1:], sizes[1:], any_order
            )

    def prepare(self, layers: PagedLayers) -> None:
        if self._fault == "compiler":
            raise RuntimeError("no C compiler")

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        if self._fault == "first block":
            recast = Recast(recast.heads, recast.block_size, 0, recast.blocks)
        if self._fault == "beside":
            self._right.scatter(staged, layers, ids - 1, recast)
        self._right.scatter(staged, layers, ids, recast)

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        self._right.gather(layers, ids.flip(0) if self._fault == "order" else ids, staged)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("compiler", "a slower way is used"),
        ("first block", "a scatter of part pages"),
        ("beside", "a scatter of own pages"),
        ("order", "a gather"),
        ("batch", "a scatter of own pages"),
    ],
)
def test_a_way_that_is_wrong_is_found(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str, detail: str
) -> None:
    monkeypatch.setattr(self_test, "FORMS", self_test.FORMS[:1])
    wrong: Any = Wrong(sim, fault)
    add_driver("sim", wrong)
    try:
        cases = list(run_self_test(torch.device("sim", 0)))
    finally:
        add_driver("sim", sim.DRIVER)
    found = [case for case in cases if case.ok is False and detail in case.detail]
    assert found, cases
    assert LaneCase("HND: PyTorch's kernels", True) == cases[1]


def test_copies_are_compared_with_the_link_that_linux_reports(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_facts, "_COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_facts, "_PCI", tmp_path)
    monkeypatch.setattr(gpu_facts, "_MODULES", tmp_path)
    monkeypatch.setattr(torch.sim, "get_device_properties", lambda _: Place(), raising=False)
    device = torch.device("sim", 0)
    facts = gpu_facts.read_facts(device)
    assert (facts.link, facts.link_gb_s) == (None, None)
    place = tmp_path / "0000:c1:00.0"
    (tmp_path / "amdgpu").mkdir()
    (tmp_path / "amdgpu" / "version").write_text("6.10\n")
    place.mkdir()
    (place / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    (place / "current_link_width").write_text("16\n")
    facts = gpu_facts.read_facts(device)
    assert (facts.link, facts.about["Driver"]) == ("32.0 GT/s PCIe, 16 lanes", "amdgpu 6.10")
    assert facts.link_gb_s == pytest.approx(63.0, rel=0.01)
    assert min(facts.to_device_gb_s, facts.to_host_gb_s) > 0


class Place:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0xC1, 0


def test_each_measured_row_has_the_limit_of_as_many_bytes() -> None:
    sides = ["step", "step beside", "load beside", "busy load"]
    sides += [f"forward {what}" for what in ("load", "save", "idle")]
    for form in FORMS:
        sides += [f"{form} to_device", f"{form} to_host"]
        sides += [f"{form} {what} {order}" for what in ("load", "gather") for order in ORDERS]
    answer = GpuAnswer("x", 10**9, 8, 2, 1, {side: [0.5] for side in sides})
    rows = {row.name: row for row in rows_of(answer)}
    load, save = rows["load, NHD, scattered blocks"], rows["save, NHD, scattered blocks"]
    assert (load.ours, load.limit, load.ratio) == (16.0, 16.0, 1.0)
    assert (save.ours, save.limit, save.ratio) == (4.0, 16.0, 0.25)
    busy = rows["load of 1 chunks in each step of 30 ms"]
    assert (busy.ours, busy.limit) == (500.0, 30 + 500 / 8)
