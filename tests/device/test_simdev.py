"""What of the simulated device could let a scenario pass that should not: order, memory,
registration, counters and faults. Its kernels are compared in ``test_gpu_check``."""

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
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


def written_by_a_kernel(value: torch.Tensor) -> None:
    value.fill_(7)


def written_by_a_copy(value: torch.Tensor) -> None:
    value.copy_(pinned(torch.full(value.shape, 7, dtype=value.dtype)), non_blocking=True)


def written_in_pages(value: torch.Tensor) -> None:
    pages = torch.full(value.shape, 7, dtype=value.dtype, device=value.device)
    ids = torch.zeros(1, dtype=torch.int64, device=value.device)
    torch.ops.simdev.scatter_pages(
        pages.view(1, 1, 1, 1, -1), [value.view(1, 1, 1, -1)], ids, 0, 0, 1
    )


def read_by_a_copy(value: torch.Tensor) -> torch.Tensor:
    target = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return target.copy_(value, non_blocking=True)


def read_by_a_kernel(value: torch.Tensor) -> torch.Tensor:
    return value + 0


def read_in_pages(value: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(value)
    ids = torch.zeros(1, dtype=torch.int64, device=value.device)
    torch.ops.simdev.gather_pages([value.view(1, 1, 1, -1)], ids, target.view(1, 1, 1, 1, 1, -1))
    return target


@pytest.mark.parametrize("write", [written_by_a_kernel, written_by_a_copy, written_in_pages])
@pytest.mark.parametrize("read", [read_by_a_copy, read_by_a_kernel, read_in_pages])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_missing_edge_gives_wrong_bytes(
    sim: ModuleType,
    device: torch.device,
    compute: torch.Stream,
    other: torch.Stream,
    write: Callable[[torch.Tensor], None],
    read: Callable[[torch.Tensor], torch.Tensor],
    is_ordered: bool,
) -> None:
    value = torch.zeros(100, dtype=torch.int32, device=device)
    compute.synchronize()
    sim.hold(compute)
    write(value)
    written = torch.sim.Event()
    written.record(compute)
    with torch.sim.stream(other):
        if is_ordered:
            written.wait(other)
        found = read(value)
    if not is_ordered:
        other.synchronize()
    sim.hold(compute, False)
    other.synchronize()
    assert found.cpu().eq(7 if is_ordered else 0).all()


def test_the_host_sees_a_copy_only_when_it_is_done(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    target = torch.zeros(100, pin_memory=True)
    source = torch.ones(100, device=device)
    compute.synchronize()
    sim.hold(compute)
    target.copy_(source, non_blocking=True)
    assert not target.any()
    sim.hold(compute, False)
    compute.synchronize()
    assert target.eq(1).all()


def test_a_copy_reads_host_memory_late(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    source = torch.ones(100, pin_memory=True)
    target = torch.zeros(100, device=device)
    sim.hold(compute)
    target.copy_(source, non_blocking=True)
    source.fill_(2)
    sim.hold(compute, False)
    assert target.cpu().eq(2).all()


def test_events_pass_with_their_last_recording(
    sim: ModuleType, device: torch.device, compute: torch.Stream, other: torch.Stream
) -> None:
    event = torch.sim.Event()
    assert event.query()
    event.wait(other)  # never recorded: nothing to wait for
    other.synchronize()
    event.record(compute)
    event.synchronize()
    assert event.query()
    sim.hold(compute)
    event.record(compute)
    assert not event.query()
    event.wait(other)
    event.record(torch.sim.Stream(device))  # the wait above is for the recording before
    event.synchronize()
    assert not other.query()
    sim.hold(compute, False)
    other.synchronize()
    assert other.query()


def test_each_thread_has_its_own_stream_and_device(
    sim: ModuleType, device: torch.device, other: torch.Stream
) -> None:
    def look() -> None:
        seen.append((torch.sim.current_device(), torch.sim.current_stream().stream_id))

    seen: list[tuple[int, int]] = []
    with torch.sim.stream(torch.sim.Stream(torch.device("sim", 1))), torch.sim.stream(other):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        look()
    look()
    assert seen == [(0, 0), (0, other.stream_id), (0, 0)]


def test_the_host_can_neither_read_nor_write_device_memory(device: torch.device) -> None:
    address = torch.ones(8, device=device).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(at, 16) for at in line.split()[0].split("-"))
        if start <= address < end:
            assert line.split()[1] == "---p"
            return
    pytest.fail("device memory has no address")


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


def test_freed_device_memory_is_used_again_on_the_same_stream(
    sim: ModuleType, device: torch.device, other: torch.Stream
) -> None:
    first = torch.empty(MIB, device=device)
    address = first.data_ptr()
    del first
    with torch.sim.stream(other):
        assert torch.empty(MIB, device=device).data_ptr() != address
    assert torch.empty(MIB, device=device).data_ptr() == address


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


def test_registered_memory_is_not_unmapped(sim: ModuleType) -> None:
    size = 4 * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    address = libc.mmap(None, ctypes.c_size_t(size), 3, 0x22, -1, ctypes.c_long(0))
    memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    undo = sim.DRIVER.pin(memory)
    assert not sim.take_error()
    libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    assert "freed while registered" in sim.take_error()
    with pytest.raises(RuntimeError, match="freed while registered"):
        undo()
    sim.take_error()


@pytest.fixture
def shared(sim: ModuleType) -> Iterator[torch.Tensor]:
    """Ones that this process has mapped read-only, ``[4 * 4096]`` uint8."""
    size = 4 * mmap.PAGESIZE
    fd = os.memfd_create("shared")
    os.pwrite(fd, bytes([1]) * size, 0)
    mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    yield torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    torch.ops.simdev.settle()
    mapping.close()
    os.close(fd)


def test_a_read_only_mapping_is_registered_for_reading_alone(
    sim: ModuleType, device: torch.device, compute: torch.Stream, shared: torch.Tensor
) -> None:
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


def test_a_copy_of_two_registrations_is_refused(
    sim: ModuleType, device: torch.device, shared: torch.Tensor
) -> None:
    half = shared.nbytes // 2
    halves = [shared.data_ptr(), shared.data_ptr() + half]
    undo = [sim.DRIVER.pin_read_only(at, half) for at in halves]
    target = torch.zeros(shared.shape, dtype=torch.uint8, device=device)
    sim.counts()
    target[:half].copy_(shared[:half], non_blocking=True)
    with pytest.raises(RuntimeError, match="invalid argument"):
        target.copy_(shared, non_blocking=True)
    assert "h2d" in calls(sim.counts())
    torch.ops.simdev.settle()
    for each in undo:
        each()


def test_a_copy_of_memory_that_was_unregistered_fails(
    sim: ModuleType, device: torch.device, compute: torch.Stream, shared: torch.Tensor
) -> None:
    target = torch.zeros(shared.shape, dtype=torch.uint8, device=device)
    undo = sim.DRIVER.pin_read_only(shared.data_ptr(), shared.nbytes)
    sim.hold(compute)
    target.copy_(shared, non_blocking=True)
    with pytest.raises(RuntimeError, match="under way"):
        undo()
    sim.hold(compute, False)
    torch.ops.simdev.settle()
    assert "unregistered meanwhile" in sim.take_error()


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


def test_calls_are_counted_with_their_thread(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    def work() -> None:
        compute.record_event(torch.sim.Event())
        sim.DRIVER.pin(memory)()

    memory = torch.zeros(8)
    sim.counts()
    worker = threading.Thread(target=work, name="worker 5")
    worker.start()
    worker.join()
    compute.synchronize()
    assert sim.counts() == {
        ("event", "worker 5"): 1,
        ("register", "worker 5"): 1,
        ("unregister", "worker 5"): 1,
        ("synchronize", "MainThread"): 1,
    }
    assert not sim.counts()


def test_the_host_waits_as_long_as_the_device_takes(sim: ModuleType, compute: torch.Stream) -> None:
    begin, end = (torch.sim.Event(enable_timing=True) for _ in range(2))
    begin.record(compute)
    sim.sleep(30_000)
    assert not compute.query()
    end.record(compute)
    assert not end.query()
    with pytest.raises(RuntimeError, match="completed"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) >= 30


def test_faults_are_sticky(sim: ModuleType, device: torch.device, compute: torch.Stream) -> None:
    cache = torch.zeros(4, 1, 1, 8, dtype=torch.int64, device=device)
    pages = torch.ones(1, 1, 1, 1, 8, dtype=torch.int64, device=device)
    ids = torch.full((1,), 4, device=device)
    event = torch.sim.Event()
    event.record(compute)
    torch.ops.simdev.scatter_pages(pages, [cache], ids, 0, 0, 1)
    with pytest.raises(RuntimeError, match="block 4 of 4"):
        compute.synchronize()
    for call in (event.record, event.query, cache.cpu, lambda: cache.fill_(1), event.wait):
        with pytest.raises(RuntimeError, match="block 4 of 4"):
            call()
    assert "block 4 of 4" in sim.take_error()
    assert not sim.take_error()
    compute.synchronize()
    assert not cache.cpu().any()


def copy_pieces(
    sim: ModuleType, pairs: list[tuple[torch.Tensor, torch.Tensor]], any_order: bool = False
) -> None:
    """Copy tensors to tensors in one call."""
    sources, targets = zip(*pairs, strict=True)
    sim.DRIVER.use_batch_copy(True)
    sim.DRIVER.batch_copy(
        torch.tensor([t.data_ptr() for t in sources]),
        torch.tensor([t.data_ptr() for t in targets]),
        torch.tensor([t.nbytes for t in sources]),
        any_order,
    )


@pytest.mark.parametrize(("any_order", "changed"), [(False, 40), (True, None)])
def test_a_batch_in_any_order_may_read_before_its_stream_gets_there(
    sim: ModuleType, device: torch.device, any_order: bool, changed: int | None
) -> None:
    sources = torch.zeros(40, 8, pin_memory=True)
    targets = torch.zeros(40, 8, device=device)
    stream = torch.sim.current_stream(device)
    sim.hold(stream)
    copy_pieces(sim, list(zip(sources, targets, strict=True)), any_order)
    sources.fill_(1)
    sim.hold(stream, False)
    late = int(targets[:, 0].cpu().sum())
    assert late == changed if changed is not None else 0 < late < 40


def test_a_batch_cannot_reach_other_memory(sim: ModuleType, device: torch.device) -> None:
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
        copy_pieces(sim, [(pinned[0], memory[0]), (source, target)])
        assert "cannot reach" in sim.take_error()
    undo()
