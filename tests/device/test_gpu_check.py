"""``objkv gpu-check`` on the simulated device, as a user runs it. Its scenarios are tested one by
one in ``test_order.py``, and its replicas in ``tests/flow``."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from objkv.connector.programs import gpu_check, self_test
from objkv.connector.programs.devices import open_device
from objkv.connector.programs.self_test import run_self_test
from objkv.ops.gpu_check.report import GpuCase
from objkv.transfer.devices import add_driver
from objkv.transfer.lanes import PagedLayers, Recast
from tests.cli.test_bench import children, runs
from tests.support.servers.redis import wait_until

COMMAND = [sys.executable, "-c", "from objkv.cli.app import main; main()"]
COMMAND += ["gpu-check", "--simulated", "--quick", "--json", "--out"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """PyTorch's own threads would take the cores of the device's streams."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(folder / "report")],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("loaded_sim")
def test_everything_passes_and_is_reported(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        out, err = process.communicate(timeout=590)
    assert process.returncode == 0, out + err
    document = json.loads(out)
    outcomes = [stage["outcome"] for stage in document["stages"]]
    assert outcomes == ["passed", "passed", "passed", "passed", "skipped"]
    assert (document["passed"], document["simulated"]) == (True, True)
    assert document["facts"]["Host to device"].endswith("GB/s")
    layouts, order, by_agent, speed, _ = document["stages"]
    assert len(layouts["cases"]) > 3 * len(self_test.FORMS)
    assert len(order["cases"]) > 5
    assert len(by_agent["cases"]) > 10
    assert all(row["name"].startswith("simulated: ") for row in speed["figures"])
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == document
    assert "**The device is simulated.**" in (tmp_path / "report" / "report.md").read_text()
    assert not list((tmp_path / "objkv" / "gpu-check").iterdir())


@pytest.mark.usefixtures("loaded_sim")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "Device: running\n"
            wait_until(lambda: bool(children(process.pid)), "a program to start")
            programs = children(process.pid)
            process.send_signal(number)
            process.wait(120)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    wait_until(lambda: not any(runs(pid) for pid in programs), "its programs to end with it")
    assert not list((tmp_path / "objkv" / "gpu-check").iterdir())
    assert not (tmp_path / "report").exists()


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
    assert GpuCase("HND: PyTorch's kernels", True, "", cases[1].seconds) == cases[1]


def test_a_link_is_read_from_linux(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_COPIED_BYTES", 1 << 20)
    monkeypatch.setattr(gpu_check, "_PCI", tmp_path)
    monkeypatch.setattr(gpu_check, "_MODULES", tmp_path)
    monkeypatch.setattr(torch.sim, "get_device_properties", lambda _: Place(), raising=False)
    device = torch.device("sim", 0)
    assert "Link" not in gpu_check.read_facts(device)
    place = tmp_path / "0000:c1:00.0"
    (tmp_path / "amdgpu").mkdir()
    (tmp_path / "amdgpu" / "version").write_text("6.10\n")
    place.mkdir()
    (place / "current_link_speed").write_text("32.0 GT/s PCIe\n")
    (place / "current_link_width").write_text("16\n")
    facts = gpu_check.read_facts(device)
    assert (facts["Link"], facts["Driver"]) == ("32.0 GT/s PCIe, 16 lanes", "amdgpu 6.10")


class Place:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0xC1, 0


def test_there_is_no_other_device_here(sim: ModuleType) -> None:
    assert open_device("cuda") is None
