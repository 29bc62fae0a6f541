"""What of the simulated device could let a scenario pass that should not, and no mutant shows:
registration, counters. Its kernels are compared in ``test_gpu_check``."""

import mmap
import warnings
from tempfile import TemporaryFile
from types import ModuleType

import pytest
import torch

from tests.device import simulated
from tests.device.simulated import calls


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The present bytes of device memory, once all streams are done."""
    torch.ops.simdev.settle()
    return simulated.kernel_view(tensor)


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture
def compute(device: torch.device) -> torch.Stream:
    return torch.sim.current_stream(device)


def test_registered_memory_is_not_freed(sim: ModuleType) -> None:
    memory = torch.zeros(4, 1000)
    undo = sim.DRIVER.pin(memory)
    assert not sim.take_error()
    del memory
    assert "freed while registered" in sim.take_error()
    undo()  # still mapped: an owner may do that while its memory is freed


def test_a_read_only_mapping_is_registered_for_reading_alone(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    with TemporaryFile() as file:
        file.write(bytes([1]) * 4 * mmap.PAGESIZE)
        file.flush()
        mapping = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE, prot=mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that PyTorch could write to it is what is tried
        shared = torch.frombuffer(mapping, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="mapped read-only"):
        sim.DRIVER.pin(shared)
    assert "mapped read-only" in sim.take_error()
    target = torch.zeros(shared.shape, dtype=torch.uint8, device=device)
    sim.counts()
    undo = sim.DRIVER.pin_read_only(shared.data_ptr(), shared.nbytes)
    target.copy_(shared, non_blocking=True)
    assert calls(sim.counts()) == {"register": 1, "h2d": 1}
    compute.synchronize()
    assert raw(target).sum() == shared.nbytes
    with pytest.raises(RuntimeError, match="registered for reading"):
        shared.copy_(target, non_blocking=True)
    assert "registered for reading" in sim.take_error()
    undo()
    sim.counts()
    target.copy_(shared, non_blocking=True)
    assert "h2d pageable" in calls(sim.counts())


def test_copies_that_wait_are_counted(sim: ModuleType, device: torch.device) -> None:
    host, fast = torch.zeros(8, 8), torch.zeros(8, 8, pin_memory=True)
    value = torch.zeros(8, 8, device=device)
    sim.counts()
    for copy, expected in {
        "h2d": lambda: value.copy_(fast, non_blocking=True),
        "d2h": lambda: fast.copy_(value, non_blocking=True),
        "d2d": lambda: value[0].copy_(value[1]),
        "h2d pageable": lambda: value.copy_(host, non_blocking=True),
        "d2h pageable": lambda: value.cpu(),
        "h2d blocking": lambda: value.copy_(fast),
        "d2h blocking": lambda: fast.copy_(value),
        "h2d strided": lambda: value.copy_(fast.t(), non_blocking=True),
        "d2h strided": lambda: fast.copy_(value.t(), non_blocking=True),
    }.items():
        expected()
        found = calls(sim.counts())
        waits = {"synchronize": 1} if " " in copy else {}
        assert {call: n for call, n in found.items() if call not in ("allocate", "event")} == {
            copy: 1,
            **waits,
        }
