"""The simulated device itself, before anything else is tested on it: order, memory, registration,
counters, time and faults."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
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


# Order


def test_work_of_a_stream_is_done_in_order(sim: ModuleType, device: torch.device) -> None:
    sim.slow(device, 0, 300)
    value = torch.zeros(1000, device=device)
    for _ in range(20):
        value.mul_(2).add_(1)
    assert value.cpu().eq(2**20 - 1).all()


def test_streams_do_not_wait_for_each_other(
    sim: ModuleType, device: torch.device, compute: torch.Stream, other: torch.Stream
) -> None:
    value = torch.zeros(8, device=device)
    compute.synchronize()
    sim.hold(compute)
    value.fill_(1)
    with torch.sim.stream(other):
        assert value.cpu().eq(0).all()
    sim.hold(compute, False)
    assert value.cpu().eq(1).all()


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


def test_streams_wait_for_streams(
    sim: ModuleType, device: torch.device, compute: torch.Stream, other: torch.Stream
) -> None:
    value = torch.zeros(8, device=device)
    compute.synchronize()
    sim.hold(compute)
    value.fill_(3)
    other.wait_stream(compute)
    with torch.sim.stream(other):
        found = value + 1
    assert not other.query()
    sim.hold(compute, False)
    other.synchronize()
    assert raw(found).eq(4).all()


def test_the_same_seed_gives_the_same_delays(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    def total_ms(seed: int) -> float:
        sim.seed(seed)
        sim.cost(launch_us=0, kernel_gbps=40e-6)  # 10 ms a kernel
        begin, end = (torch.sim.Event(enable_timing=True) for _ in range(2))
        sim.hold(compute)
        begin.record(compute)
        for _ in range(5):
            value.fill_(1)
        end.record(compute)
        sim.hold(compute, False)
        end.synchronize()
        return begin.elapsed_time(end)

    value = torch.zeros(100, device=device)
    sim.slow(compute, 10, 2000)
    assert total_ms(1) == total_ms(1) != total_ms(2)


def test_a_streams_delay_replaces_that_of_its_device(
    sim: ModuleType, device: torch.device, compute: torch.Stream, other: torch.Stream
) -> None:
    value = torch.zeros(8, device=device)
    compute.synchronize()
    sim.slow(device, 10**9, 10**9)
    sim.slow(other, 0, 0)
    with torch.sim.stream(other):
        value.fill_(1)
    other.synchronize()
    value.fill_(2)
    assert not compute.query()
    sim.slow(device, 0, 0)  # ends delays, too
    assert value.cpu().eq(2).all()


# Threads, streams and devices


def test_each_thread_has_its_own_stream_and_device(
    sim: ModuleType, device: torch.device, other: torch.Stream
) -> None:
    def look() -> None:
        seen.append((torch.sim.current_device(), torch.sim.current_stream().stream_id))
        with torch.sim.stream(on_second):
            seen.append((torch.sim.current_device(), torch.sim.current_stream().stream_id))
        seen.append((torch.sim.current_device(), torch.sim.current_stream().stream_id))

    seen: list[tuple[int, int]] = []
    on_second = torch.sim.Stream(torch.device("sim", 1))
    with torch.sim.stream(other):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.sim.current_stream() == other
    assert torch.sim.current_stream() == torch.sim.default_stream()
    assert seen == [(0, 0), (1, on_second.stream_id), (0, 0)]


def test_threads_can_share_a_stream(sim: ModuleType, other: torch.Stream) -> None:
    def select() -> None:
        for _ in range(200):
            with torch.sim.stream(other):
                assert torch.sim.current_stream() == other
            if torch.sim.current_stream() != torch.sim.default_stream():
                wrong.append(threading.get_ident())

    wrong: list[int] = []
    threads = [threading.Thread(target=select) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pool_streams_repeat_after_32(sim: ModuleType, device: torch.device) -> None:
    leisurely = [torch.sim.Stream(device).stream_id for _ in range(33)]
    urgent = torch.sim.Stream(device, priority=-1)
    assert len(set(leisurely)) == 32
    assert leisurely[0] == leisurely[-1]
    assert urgent.stream_id not in {0, *leisurely}
    assert sim.priority(urgent) == -1
    assert sim.priority(torch.sim.Stream(device)) == sim.priority(torch.sim.default_stream()) == 0


def test_devices_have_their_own_memory_and_streams(sim: ModuleType, device: torch.device) -> None:
    second = torch.device("sim", 1)
    assert torch.sim.device_count() == torch.accelerator.device_count() == 2
    value = torch.ones(8, device=second)
    assert value.device == second
    sim.hold(torch.sim.default_stream(device))
    torch.sim.synchronize(second)
    sim.hold(torch.sim.default_stream(second))
    value.fill_(2)
    sim.hold(torch.sim.default_stream(device), False)
    moved = value.to(device)  # waits for the second device's stream, as it does on CUDA
    value.fill_(3)
    sim.hold(torch.sim.default_stream(second), False)
    assert moved.cpu().eq(2).all()
    assert value.cpu().eq(3).all()
    with pytest.raises(RuntimeError, match="no device"):
        torch.zeros(1, device="sim:2")


# Memory


TOUCHES = """
import ctypes, os, torch
from tests.device import simulated
simulated.load()
value = torch.ones(8, device="sim")
value.cpu()
for touch in (lambda at: ctypes.string_at(at, 8), lambda at: ctypes.memset(at, 0, 8)):
    child = os.fork()
    if not child:
        touch(value.data_ptr())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_host_can_neither_read_nor_write_device_memory(sim: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TOUCHES],
        capture_output=True,
        cwd=Path(__file__).parents[2],
        check=False,
        timeout=300,
    )
    assert done.stdout.split() == [str(-signal.SIGSEGV).encode()] * 2, done.stderr


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


def test_recorded_streams_delay_the_poison(
    sim: ModuleType, device: torch.device, compute: torch.Stream, other: torch.Stream
) -> None:
    found = []
    for is_recorded in (True, False):
        value = torch.zeros(1000, dtype=torch.uint8, device=device)
        compute.synchronize()
        sim.hold(other)
        with torch.sim.stream(other):
            copy = value + 1
        if is_recorded:
            value.record_stream(other)
        del value
        if not is_recorded:
            compute.synchronize()
        sim.hold(other, False)
        found.append(set(raw(copy).tolist()))
    assert found == [{1}, {(DEVICE_POISON + 1) % 256}]


def test_resizing_keeps_the_contents(sim: ModuleType, device: torch.device) -> None:
    value = torch.arange(10, device=device)
    value.resize_(100_000)
    assert value[:10].cpu().tolist() == list(range(10))


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


def test_parts_of_pinned_memory_that_numpy_made_are_not_kept(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    """As on CUDA: the owner must wait for its copies."""
    target = torch.zeros(1000, device=device)
    compute.synchronize()
    sim.hold(compute)
    source = pinned(torch.ones(5000))
    part = torch.from_numpy(source.numpy()[1000:2000])
    assert part.is_pinned()
    target.copy_(part, non_blocking=True)
    del source, part
    sim.hold(compute, False)
    assert target.cpu().view(torch.uint8).eq(HOST_POISON).all()


# Registered memory


def test_registered_memory_is_pinned_in_place(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    torch.zeros(1, pin_memory=True)  # before that, PyTorch asks no device
    on_device = torch.ones(2, 1000, device=device)
    memory = torch.zeros(4, 1000)
    sim.register_host(memory)
    part = torch.from_numpy(memory.numpy()[1:3])
    assert part.is_pinned()
    sim.counts()
    part.copy_(on_device, non_blocking=True)
    assert "d2h" in calls(sim.counts())
    compute.synchronize()
    assert memory.sum() == 2000
    sim.unregister_host(memory)
    assert not memory.is_pinned()


def test_memory_is_registered_once(sim: ModuleType) -> None:
    memory = torch.zeros(4, 1000)
    sim.register_host(memory)
    for overlapping in (memory, memory[1:2]):
        with pytest.raises(RuntimeError, match="already registered"):
            sim.register_host(overlapping)
        assert "already registered" in sim.take_error()
    with pytest.raises(RuntimeError, match="already pinned"):
        sim.register_host(torch.zeros(8, pin_memory=True))
    assert "already pinned" in sim.take_error()
    sim.unregister_host(memory)
    sim.register_host(memory)
    sim.unregister_host(memory)


def test_only_registered_memory_is_unregistered(sim: ModuleType) -> None:
    memory = torch.zeros(4, 1000)
    undo = sim.DRIVER.pin(memory)
    undo()
    for again in (undo, lambda: sim.unregister_host(memory)):
        with pytest.raises(RuntimeError, match="not registered"):
            again()
        assert "not registered" in sim.take_error()


def test_registered_memory_is_not_freed(sim: ModuleType) -> None:
    memory = torch.zeros(4, 1000)
    undo = sim.DRIVER.pin(memory)
    assert not sim.take_error()
    del memory
    assert "freed while registered" in sim.take_error()
    undo()  # still mapped: an owner may do that while its memory is freed


def test_memory_that_a_failed_test_left_registered_is_not_the_fault_of_the_next(
    sim: ModuleType,
) -> None:
    sim.DRIVER.pin(torch.zeros(4, 1000))
    assert "freed while registered" in sim.take_error()
    sim.reset()
    assert not sim.take_error()


def test_memory_that_another_thread_is_freeing_may_be_registered_still(sim: ModuleType) -> None:
    begun = threading.Event()
    array = np.zeros(4000, np.uint8)
    memory = [torch.from_numpy(array)]

    def unlock(undo: Callable[[], None]) -> None:
        begun.set()
        time.sleep(0.05)
        undo()

    weakref.finalize(array, unlock, sim.DRIVER.pin(memory[0]))
    del array
    thread = threading.Thread(target=memory.clear)
    thread.start()
    assert begun.wait(10)
    assert not sim.take_error()
    thread.join()


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


def test_memory_in_use_is_not_unregistered(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    target = torch.zeros(1000, device=device)
    memory = torch.ones(1000)
    undo = sim.DRIVER.pin(memory)
    sim.hold(compute)
    target.copy_(memory, non_blocking=True)
    with pytest.raises(RuntimeError, match="under way"):
        undo()
    assert "under way" in sim.take_error()


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
        sim.register_host(shared)
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


def test_a_device_may_refuse_read_only_memory(sim: ModuleType, shared: torch.Tensor) -> None:
    sim.allow_read_only(False)
    with pytest.raises(RuntimeError, match="no read-only memory"):
        sim.DRIVER.pin_read_only(shared.data_ptr(), shared.nbytes)
    assert not sim.take_error()
    sim.reset()
    sim.DRIVER.pin_read_only(shared.data_ptr(), shared.nbytes)()


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


# Counters


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
        event = torch.sim.Event()
        event.record(compute)
        event.wait(compute)
        event.synchronize()
        event.query()
        torch.empty(8, device=device).fill_(1)
        torch.empty(8, pin_memory=True)
        sim.DRIVER.pin(memory)()

    memory = torch.zeros(8)
    sim.counts()
    worker = threading.Thread(target=work, name="worker 5")
    worker.start()
    worker.join()
    compute.synchronize()
    assert (
        sim.counts(reset=False)
        == sim.counts()
        == {
            ("event", "worker 5"): 1,
            ("stream wait", "worker 5"): 1,
            ("synchronize", "worker 5"): 1,
            ("query", "worker 5"): 1,
            ("allocate", "worker 5"): 1,
            ("kernel", "worker 5"): 1,
            ("pin", "worker 5"): 1,
            ("register", "worker 5"): 1,
            ("unregister", "worker 5"): 1,
            ("synchronize", "MainThread"): 1,
        }
    )
    assert not sim.counts()


# Time


def elapsed_ms(sim: ModuleType, streams: list[torch.Stream], work: Callable[[], object]) -> float:
    """Time of ``work`` on each stream, until the last is done, by the streams' own clocks."""
    first = streams[0]
    begin = torch.sim.Event(enable_timing=True)
    sim.hold(first)
    begin.record(first)
    ends = []
    for stream in streams:
        begin.wait(stream)
        with torch.sim.stream(stream):
            work()
        ends.append(torch.sim.Event(enable_timing=True))
        ends[-1].record(stream)
    sim.hold(first, False)
    for end in ends:
        end.synchronize()
    return max(begin.elapsed_time(end) for end in ends)


@pytest.fixture
def copies(
    sim: ModuleType, device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Copies of 4 GiB in both directions, which take 86 ms each at 50 GB/s."""
    sim.cost(launch_us=0, copy_gbps=50, kernel_gbps=1000, dry=True)
    value = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    memory = torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
    return (
        lambda: value.copy_(memory, non_blocking=True),
        lambda: memory.copy_(value, non_blocking=True),
    )


def test_a_copy_takes_its_time(
    sim: ModuleType, compute: torch.Stream, copies: list[Callable[[], object]]
) -> None:
    for copy in copies:
        assert elapsed_ms(sim, [compute], copy) == pytest.approx(85.9, abs=0.1)


def test_streams_share_the_copy_engine_of_each_direction(
    sim: ModuleType,
    compute: torch.Stream,
    other: torch.Stream,
    copies: list[Callable[[], object]],
) -> None:
    def next_copy() -> None:
        turns.pop()()

    up, down = copies
    turns = [up, up]
    assert elapsed_ms(sim, [compute, other], next_copy) == pytest.approx(171.8, abs=0.2)
    turns = [up, down]
    assert elapsed_ms(sim, [compute, other], next_copy) == pytest.approx(85.9, abs=0.1)


def test_many_small_operations_take_as_long_as_the_model_says(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    def work() -> None:
        for _ in range(500):
            sim.sleep(100)

    assert elapsed_ms(sim, [compute], work) == pytest.approx(50, abs=10)


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


def test_launches_take_the_time_of_their_thread(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    sim.cost(launch_us=20_000)
    begin, end = (torch.sim.Event(enable_timing=True) for _ in range(2))
    begin.record(compute)
    torch.ops.simdev.sleep(0)
    end.record(compute)
    end.synchronize()
    assert begin.elapsed_time(end) >= 20


def test_kernels_take_time_for_what_they_move(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    cache = torch.zeros(1000, 10_000, dtype=torch.uint8, device=device)
    pages = torch.ones(100, 10_000, dtype=torch.uint8, device=device)
    ids = torch.arange(100, device=device)
    chosen = torch.empty_like(pages)
    compute.synchronize()
    sim.cost(launch_us=0, kernel_gbps=0.01)
    for work in (
        lambda: cache.index_copy_(0, ids, pages),
        lambda: torch.index_select(cache, 0, ids, out=chosen),
        lambda: cache[:100].copy_(pages),
        lambda: torch.ops.simdev.scatter_pages(
            pages.view(1, 100, 1, 1, -1), [cache.view(-1, 1, 1, 10_000)], ids, 0, 0, 1
        ),
    ):
        assert elapsed_ms(sim, [compute], work) == pytest.approx(100, abs=20)


# Faults


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


def test_kernels_fault_where_cuda_does(
    sim: ModuleType, device: torch.device, compute: torch.Stream
) -> None:
    value = torch.zeros(4, device=device)
    value.index_select(0, torch.tensor([9], device=device))
    with pytest.raises(RuntimeError, match="out of range"):
        compute.synchronize()
    assert "out of range" in sim.take_error()
