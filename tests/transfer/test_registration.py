"""Windows of an arena are registered in the background, and unlocked before it is unmapped."""

import os
from collections.abc import Callable
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from objkv.agent.memory.arena import BOARD_BYTES, PAGE, Arena
from objkv.transfer import devices
from objkv.transfer.devices import CudaDriver, CudaRuntime, DeviceDriver
from objkv.transfer.registration import ArenaRegistration, RegistrationWindows
from objkv.transfer.slabs import SlabPool
from tests.support.device import ON_HOST
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = ON_HOST
START, WINDOW, TOTAL = 100 * PAGE, 4 * PAGE, 10 * PAGE


class Pins:
    """A driver that notes what is registered, and can be held up."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.undone: list[int] = []
        self.gate, self.entered = Event(), Event()
        self.gate.set()
        self.refuses = False

    def __call__(self, address: int, nbytes: int) -> Callable[[], None]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.refuses:
            raise RuntimeError("not supported")
        self.now[address] = nbytes

        def undo() -> None:
            self.undone.append(address)
            del self.now[address]

        return undo


@pytest.fixture
def pins() -> Pins:
    return Pins()


@pytest.fixture
def windows(pins: Pins) -> RegistrationWindows:
    return RegistrationWindows(START, TOTAL, pins, window_bytes=WINDOW)


def has(windows: RegistrationWindows, start: int, nbytes: int) -> bool:
    return bool(windows.are_readable(np.array([start]), nbytes)[0])


def ended(windows: RegistrationWindows) -> bool:
    """Close and wait; whether the mapping may be removed."""
    done = Event()
    windows.close(done.set)
    return done.wait(PATIENCE_S) and windows.join(PATIENCE_S)


def test_pages_exist_before_a_driver_locks_them() -> None:
    """It would make them while no thread may launch a kernel."""
    large = Arena.create(64 * PAGE)
    before = os.fstat(large.fd).st_blocks
    reader = Arena.join(os.dup(large.fd))
    seen = list[int]()

    def pin(address: int, nbytes: int) -> Callable[[], None]:
        seen.append(os.fstat(large.fd).st_blocks)
        return lambda: None

    frames = ArenaRegistration(SlabPool("load", count=1, slab_bytes=PAGE), pin)
    frames.attach(reader)
    windows = frames.windows
    assert windows is not None
    first = np.frombuffer(reader.view, np.uint8).ctypes.data + BOARD_BYTES
    wait_until(lambda: has(windows, first, 1))
    assert seen[0] - before >= 64 * PAGE // 512
    frames.detach(reader.close)
    assert frames.join(PATIENCE_S)
    large.close()


def test_asking_does_not_wait_for_the_driver(pins: Pins, windows: RegistrationWindows) -> None:
    assert windows.join(0.0)
    pins.gate.clear()
    for _ in range(3):
        assert not has(windows, START, 1)
    assert pins.entered.wait(PATIENCE_S)
    done = Event()
    windows.close(done.set)
    assert not windows.join(0.0)
    assert not done.is_set(), "the mapping stays until the driver has returned"
    pins.gate.set()
    assert done.wait(PATIENCE_S)
    assert pins.undone == [START]
    assert not has(windows, START + WINDOW, 1)
    assert windows.join(PATIENCE_S)
    assert not pins.now


def test_after_a_refusal_no_more_is_registered(
    pins: Pins, windows: RegistrationWindows, caplog: pytest.LogCaptureFixture
) -> None:
    pins.refuses = True
    pins.gate.clear()
    assert not has(windows, START, 1)
    assert not has(windows, START + WINDOW, 1)
    pins.gate.set()
    wait_until(lambda: "not registered" in caplog.text)
    pins.refuses = False
    assert not has(windows, START + 2 * WINDOW, 1)
    assert ended(windows)
    assert not pins.now
    assert caplog.text.count("not registered") == 1


def test_without_a_thread_nothing_is_registered_and_the_mapping_goes(
    pins: Pins, windows: RegistrationWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", none_left)
        assert not has(windows, START, 1)
    assert not has(windows, START + WINDOW, 1)
    assert ended(windows)
    assert not pins.now


def test_an_abandoned_mapping_stays_registered(pins: Pins, windows: RegistrationWindows) -> None:
    has(windows, START, 1)
    wait_until(lambda: has(windows, START, 1))
    windows.abandon()
    assert windows.join(PATIENCE_S)
    assert pins.now == {START: WINDOW}


@pytest.mark.parametrize("place", ["begin", "undo"])
def test_a_fault_of_the_driver_does_not_keep_the_mapping(place: str) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("failed")

    pin = fail if place == "begin" else (lambda address, nbytes: fail)
    begin = fail if place == "begin" else (lambda: None)
    windows = RegistrationWindows(START, TOTAL, pin, window_bytes=WINDOW, begin=begin)
    has(windows, START, 1)
    if place == "undo":
        wait_until(lambda: has(windows, START, 1))
    assert ended(windows)


@pytest.mark.parametrize("beyond", [1, PAGE, 40 * PAGE])
def test_spans_outside_the_arena_are_refused_and_keep_no_slab(pins: Pins, beyond: int) -> None:
    """Of one that is cut off after one byte, numpy would repeat that byte."""
    pins.refuses, arena = True, Arena.create(TOTAL + WINDOW)
    slabs = SlabPool("load", count=1, slab_bytes=PAGE)
    frames = ArenaRegistration(slabs, pins, window_bytes=WINDOW)
    frames.attach(arena)
    sizes = np.array([64, 2])
    for starts in ([arena.nbytes - 66 + beyond, arena.nbytes - 2 + beyond], [-66, -2]):
        with pytest.raises(IndexError, match="spans from"):
            frames.readable(np.array([starts]), sizes)
        assert slabs.leased == 0
    frames.detach(arena.close)
    assert frames.join(PATIENCE_S)


class Runtime:
    """The CUDA runtime, as ctypes calls it."""

    def __init__(self, attributes: dict[int, int]) -> None:
        self.attributes = attributes
        self.error = self.last = 0
        self.registered: dict[int, tuple[int, int]] = {}

    def _end(self, error: int) -> int:
        self.last = error or self.last
        return error

    def cudaGetLastError(self) -> int:
        last, self.last = self.last, 0
        return last

    def cudaGetDevice(self, device: Any) -> int:
        device._obj.value = 1
        return 0

    def cudaDeviceGetAttribute(self, value: Any, number: Any, device: Any) -> int:
        assert device.value == 1
        value._obj.value = self.attributes.get(number.value, 0)
        return self._end(0 if number.value in self.attributes else 1)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> SimpleNamespace:
        """As PyTorch calls it."""
        if not self.error:
            self.registered[address] = (nbytes, flags)
        return SimpleNamespace(value=self._end(self.error))

    def cudaHostUnregister(self, address: int) -> SimpleNamespace:
        if not self.error:
            del self.registered[address]
        return SimpleNamespace(value=self._end(self.error))


READ_ONLY, HOST_TABLES = 113, 100


def cuda(library: Runtime, monkeypatch: pytest.MonkeyPatch) -> CudaDriver:
    monkeypatch.setattr(devices.torch.cuda, "cudart", lambda: library)
    driver = CudaDriver("cuda")
    driver.runtime = CudaRuntime(library)
    return driver


@pytest.mark.parametrize(
    ("attributes", "flags"),
    [({READ_ONLY: 1}, 8), ({READ_ONLY: 0, HOST_TABLES: 1}, 0), ({READ_ONLY: 0}, None), ({}, None)],
)
def test_a_cuda_device_is_asked_whether_it_registers_for_reading(
    attributes: dict[int, int], flags: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Runtime(attributes)
    driver = cuda(library, monkeypatch)
    if flags is None:
        with pytest.raises(RuntimeError, match="no read-only memory"):
            driver.pin_read_only(START, WINDOW)
    else:
        undo = driver.pin_read_only(START, WINDOW)
        assert library.registered == {START: (WINDOW, flags)}
        undo()
    assert not library.registered
    assert not library.last, "an error would be reported by the next launch of a kernel"


@pytest.mark.parametrize("reads_only", [False, True])
def test_errors_of_the_cuda_runtime_are_cleared(
    reads_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, memory = Runtime({READ_ONLY: 1}), torch.zeros(WINDOW, dtype=torch.uint8)
    driver = cuda(library, monkeypatch)

    def pin() -> Callable[[], None]:
        return driver.pin_read_only(START, WINDOW) if reads_only else driver.pin(memory)

    undo = pin()
    library.error = 2
    with pytest.raises(RuntimeError, match="page-locking 16384 bytes failed"):
        pin()
    assert not library.last
    with pytest.raises(RuntimeError, match="unlocking memory failed"):
        undo()
    assert not library.last


def test_devices_without_a_runtime_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaRuntime, "loaded", lambda: None)
    with pytest.raises(RuntimeError, match="no CUDA runtime"):
        CudaDriver("cuda").pin_read_only(START, WINDOW)
    with pytest.raises(RuntimeError, match="cannot page-lock"):
        DeviceDriver("xpu").pin_read_only(START, WINDOW)
