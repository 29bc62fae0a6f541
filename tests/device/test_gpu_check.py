"""The device of ``objkv gpu-check``, and the self-test of lanes, on the simulated device."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from objkv.programs import gpu_facts
from tests.device.self_test import run_self_test


def test_every_layout_is_right_in_every_way(sim: ModuleType) -> None:
    sim.slow("sim", 0, 300)
    sim.DRIVER.use_batch_copy(True)
    cases = list(run_self_test(torch.device("sim", 0)))
    assert not [case for case in cases if case.is_right is False]
    tested = {case.name.partition(": ")[2] for case in cases if case.is_right}
    assert tested == {
        "the driver's kernels",
        "PyTorch's kernels",
        "batches of copies",
        "check at start",
    }


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
