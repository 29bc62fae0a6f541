"""The device of ``objkv gpu-check``, and the self-test of lanes, on the simulated device."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from objkv.programs import gpu_facts
from objkv.transfer.lanes import PagedLayers, Recast
from tests.device import self_test
from tests.device.self_test import LaneCase, run_self_test
from tests.device.simulated import SimKernels


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


class Wrong(SimKernels):
    """Kernels of the simulated device that do one thing wrong."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        if self._fault == "first block":
            recast = Recast(recast.heads, recast.block_size, 0, recast.blocks)
        if self._fault == "beside":
            super().scatter(staged, layers, ids - 1, recast)
        super().scatter(staged, layers, ids, recast)

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        super().gather(layers, ids.flip(0) if self._fault == "order" else ids, staged)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("first block", "a scatter of part pages"),
        ("beside", "a scatter of own pages"),
        ("order", "a gather"),
    ],
)
def test_a_way_that_is_wrong_is_found(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str, detail: str
) -> None:
    monkeypatch.setattr(self_test, "FORMS", self_test.FORMS[:1])
    monkeypatch.setattr(sim.DRIVER, "kernels", Wrong(fault))
    cases = list(run_self_test(torch.device("sim", 0)))
    assert [case for case in cases if case.ok is False and detail in case.detail], cases
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
