"""The simulated device: PyTorch knows it as ``sim``, and objkv as any other device.

``load()`` builds ``simdev.cpp`` once per checkout, which takes half a minute. Then ``torch.sim``
and devices such as ``torch.device("sim:0")`` exist in this process, and the functions of this
module control them. Tests use the fixture ``sim``, which also resets everything at their end.
"""

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from objkv.transfer.devices import DRIVERS, DeviceDriver
from objkv.transfer.kernels import PageKernels
from objkv.transfer.lanes import PagedLayers, Recast

DEVICES = 2
SOURCE = Path(__file__).with_name("simdev.cpp")
CACHE = Path(__file__).parents[2] / ".cache" / "simdev"
BUILD_S = 900
"""Limit for the compiler, on a machine that is busy with other things."""

# vLLM's CPU platform replaces these with placeholders when it is imported.
_Event, _Stream, _synchronize = torch.Event, torch.Stream, torch.accelerator.synchronize


class NoCompilerError(RuntimeError):
    """There is no C++ compiler, and the device has not been built before."""


# Building and loading


def built_device() -> Path:
    """Return the built library, after building it if the source or PyTorch changed.
    Raises ``NoCompilerError``. Any number of processes can call this at the same time."""
    root = Path(torch.__file__).parent
    flags = [
        *("-std=c++20", "-O1", "-shared", "-fPIC", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"),
        *(f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"),
    ]
    version = f"{torch.__version__} {torch.version.git_version} {flags}".encode()
    digest = hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:16]
    built = CACHE / f"libsimdev-{digest}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        raise NoCompilerError("the simulated device needs a C++ compiler: install g++, or set CXX")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fresh = Path(folder) / built.name
        command = [*compiler.split(), str(SOURCE), *flags, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        fresh.replace(built)  # another process may have built the same
    for old in CACHE.glob("libsimdev-*.so"):
        if old != built:
            old.unlink(missing_ok=True)
    return built


def load() -> None:
    if "sim" in vars(torch):
        return
    torch.ops.load_library(str(built_device()))
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module())
    DRIVERS["sim"] = DRIVER
    _name_threads()
    atexit.register(_end)


def _module() -> types.ModuleType:
    """``torch.sim``, with the functions of ``torch.cuda`` that objkv and its tests use."""
    module = types.ModuleType("torch.sim")
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": lambda: torch.accelerator.current_device_index(),
        "set_device": lambda device: torch.accelerator.set_device_index(device),
        "synchronize": lambda device=None: _synchronize(device),
        "Stream": lambda device=None, priority=0: _Stream(_device(device), priority=priority),
        "Event": lambda enable_timing=False, blocking=False: _Event(
            "sim", enable_timing=enable_timing, blocking=blocking
        ),
        "current_stream": lambda device=None: torch.accelerator.current_stream(
            _device(device).index
        ),
        "default_stream": default_stream,
        "set_stream": torch.accelerator.set_stream,
        "stream": _on_stream,
        "get_device_name": lambda device=None: "simulated device",
        "mem_get_info": lambda device=None: torch._C._accelerator_getMemoryInfo(
            _device(device).index
        ),
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(functions)
    return module


@contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Select a stream and its device, like ``torch.cuda.stream``. ``torch.Stream`` itself keeps the
    previous stream in the object, which threads may share."""
    if stream is None:
        yield
        return
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device.index)
    torch.accelerator.set_device_index(stream.device.index)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def _device(device: torch.device | str | int | None) -> torch.device:
    if isinstance(device, int):
        return torch.device("sim", device)
    found = torch.device("sim" if device is None else device)
    if found.index is None:
        return torch.device("sim", torch.accelerator.current_device_index())
    return found


def _end() -> None:
    """Let streams finish, so that none is in a kernel while the process is taken down."""
    relax()
    torch.ops.simdev.settle()


# The driver


class SimKernels(PageKernels):
    """One launch for all layers."""

    def scatter(
        self, staged: torch.Tensor, layers: PagedLayers, ids: torch.Tensor, recast: Recast
    ) -> None:
        torch.ops.simdev.scatter_pages(
            staged, layers.caches, ids, recast.first_block, *recast.heads
        )

    def gather(self, layers: PagedLayers, ids: torch.Tensor, staged: torch.Tensor) -> None:
        torch.ops.simdev.gather_pages(layers.caches, ids, staged)


class SimDriver(DeviceDriver):
    def __init__(self) -> None:
        super().__init__("sim")
        self.kernels = SimKernels()

    def use_batch_copy(self, on: bool) -> None:
        """Whether the device can copy many pieces in one call. Not by default."""
        self.batch_copy = _batch_copy if on else None

    def event(self) -> torch.Event:
        """See ``DeviceDriver.event``. Waiters sleep."""
        return _Event("sim")

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """See ``DeviceDriver.pin``. Keep ``memory`` alive until it is unlocked. Raises
        ``RuntimeError`` for memory that is pinned or registered already, as a driver does, and
        what unlocks it if copies of it are under way."""
        torch.ops.simdev.register_host(memory)
        address = memory.data_ptr()
        return lambda: torch.ops.simdev.unregister_host(address)

    def pin_read_only(self, address: int, nbytes: int) -> Callable[[], None]:
        """See ``DeviceDriver.pin_read_only``. Keep the memory mapped until it is unlocked."""
        torch.ops.simdev.register_read_only(address, nbytes)
        return lambda: torch.ops.simdev.unregister_host(address)


def _batch_copy(src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, any_order: bool) -> None:
    torch.ops.simdev.batch_copy(src, dst, sizes, any_order)


DRIVER = SimDriver()


# Controls


def slow(target: torch.Stream | torch.device | str, low_us: int, high_us: int) -> None:
    """Delay each operation by a random time between these. A stream's own delay, even 0, replaces
    that of its device, which all other streams have."""
    device, stream = _place(target)
    torch.ops.simdev.slow(device, stream, low_us, high_us)


def hold(stream: torch.Stream, on: bool = True) -> None:
    """Let a stream stand still, or continue. Waiting for a held stream never ends."""
    torch.ops.simdev.hold(*_place(stream), on)


def seed(number: int) -> None:
    torch.ops.simdev.set_seed(number)


def cost(*, launch_us: float, copy_gbps: float, kernel_gbps: float, dry: bool) -> None:
    """Make operations take their time on a device of these speeds, at least.

    Args:
        launch_us: how long each call of the driver occupies the calling thread.
        copy_gbps: speed of copies between host and device in GB/s (10^9 bytes), in each direction,
            for all streams of a device together.
        kernel_gbps: how fast kernels write, for all streams of a device together.
        dry: copies and page kernels take time but move no bytes, and nothing is poisoned. Real
            copies can be slower than the model on this machine.
    """
    torch.ops.simdev.set_cost(launch_us, copy_gbps, kernel_gbps, dry)


def relax() -> None:
    torch.ops.simdev.relax()


def reset() -> None:
    """Finish all work, forget all delays, costs, faults, counters, and registrations of memory that
    has been freed, and give that memory back to the system."""
    relax()
    torch.ops.simdev.settle()
    torch.ops.simdev.set_cost(0.0, 0.0, 0.0, False)
    DRIVER.use_batch_copy(False)
    torch.ops.simdev.take_error()
    torch.ops.simdev.forget_dead_hosts()
    torch.ops.simdev.trim()
    torch.ops.simdev.counts(True)


def sleep(us: int) -> None:
    torch.ops.simdev.sleep(us)


def take_error() -> str:
    """Return and clear the first fault of a kernel or copy, which makes all later calls fail, or
    else the first misuse of registered memory. "" if there is none. Another thread that is just
    freeing registered memory has a second to unlock it."""
    return str(torch.ops.simdev.take_error())


def counts(reset: bool = True) -> Counter[tuple[str, str]]:
    """Return how often each thread has called the driver since the last reset.

    Keys are (call, name of the thread). Calls:
        ``h2d``, ``d2h``, ``d2d``: copies that did not wait.
        ``h2d pageable``, ``h2d strided``, ``h2d blocking`` and the same of ``d2h``: copies that
            waited for the stream, because host memory was not pinned, dtypes or strides differed,
            or the caller did not pass ``non_blocking``. Each is a ``synchronize`` as well.
        ``batch copy``, ``kernel``: launches. ``event``: recorded. ``stream wait``, ``query``.
        ``synchronize``: the thread waited for the device.
        ``allocate``, ``pin``: memory from PyTorch's allocators. ``register``, ``unregister``.
        ``at once ...``: operators that the device cannot do asynchronously.
    """
    found: Counter[tuple[str, str]] = Counter()
    alive = {thread.native_id: thread.name for thread in threading.enumerate()}
    for call, thread, number in zip(*torch.ops.simdev.counts(reset), strict=True):
        name = alive.get(thread) or _names.get(thread) or f"thread {thread}"
        found[call, name] += number
    return found


def calls(counted: Counter[tuple[str, str]], thread: str = "") -> dict[str, int]:
    """What threads called whose names begin with ``thread``."""
    found: Counter[str] = Counter()
    for (call, name), number in counted.items():
        if name.startswith(thread):
            found[call] += number
    return dict(found)


def kernel_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU over the same device memory, as kernels see it. Nothing orders
    what the host does with it, and it does not keep the memory."""
    view: torch.Tensor = torch.ops.simdev.kernel_view(tensor)
    return view


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return _Stream(stream_id=0, device_index=_device(device).index, device_type=_PRIVATE_USE_1)


_PRIVATE_USE_1 = 20
"""``c10::DeviceType``, in which streams are expressed."""
_names: dict[int | None, str] = {}
"""Names of threads, also of those that have ended, by native id."""


def _name_threads() -> None:
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        start(thread)
        _names[thread.native_id] = thread.name

    threading.Thread.start = noted  # type: ignore[method-assign]


def _place(target: torch.Stream | torch.device | str) -> tuple[int, int]:
    """The device and stream of a target, -1 for all streams."""
    if isinstance(target, torch.Stream):
        return target.device.index, target.stream_id
    return _device(target).index, -1
