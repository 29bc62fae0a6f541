"""What of the simulated device could let a scenario pass that should not: order, memory,
registration, counters and faults. Its kernels are compared in ``test_gpu_check``."""

import mmap
import warnings
from collections import Counter
from tempfile import TemporaryFile
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.device import simulated

MIB = 1 << 20
DEVICE_POISON, HOST_POISON = 0xD9, 0xB7


def pinned(data: torch.Tensor) -> torch.Tensor:
    """A copy of ``data`` in pinned memory."""
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The present bytes of device memory, once all streams are done."""
    torch.ops.simdev.settle()
    return simulated.kernel_view(tensor)


def calls(found: Counter[tuple[str, str]]) -> dict[str, int]:
    """Calls by any thread."""
    total: Counter[str] = Counter()
    for (call, _), number in found.items():
        total[call] += number
    return dict(total)


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture
def compute(device: torch.device) -> torch.Stream:
    """The stream that tests compute on."""
    return torch.sim.current_stream(device)


@pytest.fixture
def other(device: torch.device) -> torch.Stream:
    return torch.sim.Stream(device)


def test_freed_device_memory_is_poisoned_in_stream_order(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    value = torch.zeros(1000, dtype=torch.uint8, device=device)
    seen = sim.kernel_view(value)
    compute.synchronize()
    sim.hold(compute)
    copy = value + 1
    del value
    assert not seen.any()
    sim.hold(compute, False)
    compute.synchronize()
    assert seen.eq(DEVICE_POISON).all()
    assert copy.cpu().eq(1).all()


def test_pinned_memory_is_kept_until_its_copies_are_done(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    target = torch.zeros(5000, device=device)
    compute.synchronize()
    sim.hold(compute)
    source = pinned(torch.ones(5000))
    address = source.data_ptr()
    target.copy_(source, non_blocking=True)
    del source
    assert torch.empty(5000, pin_memory=True).data_ptr() != address
    sim.hold(compute, False)
    assert target.cpu().eq(1).all()
    again = torch.empty(5000, pin_memory=True)
    assert again.data_ptr() == address
    assert again.view(torch.uint8).eq(HOST_POISON).all()


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


def test_a_batch_cannot_reach_other_memory(sim: ModuleType, device: torch.device) -> None:
    sim.DRIVER.use_batch_copy(True)
    memory = torch.zeros(2, 8, device=device)
    pinned = torch.zeros(2, 8, pin_memory=True)
    second = torch.zeros(2, 8, device="sim:1")
    beyond = torch.from_numpy(np.zeros(3 * 4096, dtype=np.uint8))[:2048]
    undo = sim.DRIVER.pin(beyond)
    too_long = torch.from_numpy(np.lib.stride_tricks.as_strided(beyond.numpy(), (4096,), (1,)))
    for source, target in [
        (torch.zeros(8), memory[0]),
        (memory[0], torch.zeros(8)),
        (pinned[0], second[0]),
        (too_long, memory[0]),
    ]:
        both = ((pinned[0], source), (memory[0], target))
        addresses = (torch.tensor([piece.data_ptr() for piece in pair]) for pair in both)
        sizes = torch.tensor([piece.nbytes for piece in both[0]])
        sim.DRIVER.batch_copy(*addresses, sizes, False)
        assert "cannot reach" in sim.take_error()
    undo()
