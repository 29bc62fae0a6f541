"""Device lanes: streams that copy pages between slabs and a paged cache in device memory.

One lane serves CUDA, ROCm, XPU and any other device that PyTorch has streams and events for.
The device's driver adds the rest, such as page-locking existing memory.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from objkv.errors import ConfigError
from objkv.transfer.kernels import PageKernels, page_kernels
from objkv.transfer.lanes import (
    Ints,
    Lane,
    Mark,
    PagedLayers,
    Recast,
    address_of,
    check_reach,
    offsets_of,
    run_starts,
    upload,
)

logger = logging.getLogger(__name__)
_URGENT, _LEISURELY = -1, 0
"""Priorities of streams. A step may wait for a load, but nothing waits for a save."""
_STAGING_BYTES_MAX = 32 << 20
"""Device memory of a lane for pages that a kernel distributes. vLLM has not counted this."""
_BATCH_BYTES_MIN = 28 << 10
"""Smaller blocks are distributed by a kernel: copy engines take about as long for each piece.
Source: vLLM 0.32, ``THRESHOLD_BYTES`` in ``v1/kv_offload/cpu/swap_blocks_triton.py``, on an
H100."""

SEAM_BYTES: Final = 64 << 20
"""Copies end where the host's address is a multiple of this, so that memory may be page-locked in
pieces which end there: CUDA refuses a copy that spans two of them."""

_Copies = tuple[Ints, Ints, Ints]
"""Addresses on the host and on the device, and sizes, ``[copies]`` each."""
BatchCopy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
"""Submits many copies at once to the current stream: source addresses, target addresses and sizes,
each ``[n]`` int64 on the CPU, and whether sources may be read out of stream order."""


class DeviceDriver:
    """What ``torch.get_device_module`` lacks of a device. This one is by PyTorch's means alone."""

    def __init__(self, device_type: str) -> None:
        self.kernels = page_kernels()
        self.batch_copy: BatchCopy | None = None
        """None if the device has none."""
        self._device_type = device_type

    def event(self) -> Any:
        """Return a new event of the current device. Threads that wait for it sleep."""
        return torch.Event(self._device_type)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Page-lock ``memory``, a contiguous tensor on the CPU, in place. Returns a function that
        unlocks it. Raises ``RuntimeError`` if the system refuses. PyTorch cannot, so here the
        memory stays pageable, and copies block the thread that submits them."""
        return lambda: None

    def pin_read_only(self, address: int, nbytes: int) -> Callable[[], None]:
        """Page-lock memory that this process has mapped read-only, for the current device, which
        may only read it. Both arguments are multiples of a page. Returns a function that unlocks
        it, or raises ``RuntimeError``; either leaves no error behind."""
        raise RuntimeError("PyTorch cannot page-lock existing memory of this device")


_READ_ONLY_SUPPORTED, _USES_HOST_TABLES, _READ_ONLY = 113, 100, 8
"""``cudaDevAttrHostRegisterReadOnlySupported``, ``cudaHostRegisterReadOnly``, and between them
``cudaDevAttrPageableMemoryAccessUsesHostPageTables``. Source: CUDA 13.0, ``driver_types.h``."""


class CudaRuntime:
    """Functions of the CUDA runtime that PyTorch does not have. Thread-safe. A call that fails
    leaves its error in the library, for its thread. The next check of a kernel launch would report
    it as its own, so each failure here is also cleared."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def loaded(cls) -> "CudaRuntime | None":
        """Return the runtime that this process has loaded, None if there is none, as with ROCm.
        Another copy of the library would have its own errors."""
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart" in line}
        for path in sorted(paths):
            try:
                return cls(ctypes.CDLL(path))
            except OSError:
                logger.debug("library not loaded path=%s", path, exc_info=True)
        return None

    def clear(self) -> None:
        """Forget the error of this thread's last call, unless the device has failed for good."""
        self._library.cudaGetLastError()

    def attribute(self, number: int) -> int:
        """Return an attribute of the current device, 0 if this version does not know it."""
        device, value, library = ctypes.c_int(0), ctypes.c_int(0), self._library
        if library.cudaGetDevice(ctypes.byref(device)) or library.cudaDeviceGetAttribute(
            ctypes.byref(value), ctypes.c_int(number), device
        ):
            self.clear()
            return 0
        return value.value


class CudaDriver(DeviceDriver):
    """CUDA, and ROCm under the same names."""

    @cached_property
    def runtime(self) -> CudaRuntime | None:
        """The CUDA runtime; None with ROCm."""
        return CudaRuntime.loaded() if torch.version.hip is None else None

    def event(self) -> torch.cuda.Event:
        """See ``DeviceDriver.event``. ``torch.Event`` ignores ``blocking`` on CUDA, and its waiters
        spin on a core that the engine may need (PyTorch 2.13)."""
        return torch.cuda.Event(blocking=True)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """See ``DeviceDriver.pin``. PyTorch's own pinned memory is rounded up to a power of two."""
        return self._register(memory.data_ptr(), memory.nbytes, 0)

    def pin_read_only(self, address: int, nbytes: int) -> Callable[[], None]:
        """See ``DeviceDriver.pin_read_only``. Many devices cannot, so their attribute is read
        first. Devices that use the host's page tables need no flag."""
        if self.runtime is None:
            raise RuntimeError("no CUDA runtime")
        if self.runtime.attribute(_READ_ONLY_SUPPORTED):
            return self._register(address, nbytes, _READ_ONLY)
        if self.runtime.attribute(_USES_HOST_TABLES):
            return self._register(address, nbytes, 0)
        raise RuntimeError("the device registers no read-only memory")

    def _register(self, address: int, nbytes: int, flags: int) -> Callable[[], None]:
        library = torch.cuda.cudart()
        error = library.cudaHostRegister(address, nbytes, flags)
        self._check(error, f"page-locking {nbytes} bytes")
        return lambda: self._check(library.cudaHostUnregister(address), "unlocking memory")

    def _check(self, error: Any, what: str) -> None:
        """Raise ``RuntimeError`` for an error that PyTorch returns but leaves in the runtime."""
        if error.value:
            if self.runtime is not None:
                self.runtime.clear()
            raise RuntimeError(f"{what} failed: {error}")


DRIVERS: Final[dict[str, DeviceDriver]] = {}
"""Those in use, by type of device."""


def driver_of(device: torch.device) -> DeviceDriver:
    """Return the driver of a device. Raises ``ConfigError`` for an unsupported kind."""
    kind = device.type
    if kind not in DRIVERS:
        if kind not in ("cuda", "xpu"):
            raise ConfigError(
                f"objkv supports CUDA, ROCm, XPU and CPU but not {kind}: run the model without the "
                "objkv connector"
            )
        DRIVERS[kind] = CudaDriver(kind) if kind == "cuda" else DeviceDriver(kind)
    return DRIVERS[kind]


class DeviceMark(Mark):
    """An event on a stream."""

    def __init__(self, lane: "DeviceLane", event: Any) -> None:
        self.event, self._lane = event, lane

    def done(self) -> bool:
        """See ``Mark.done``."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See ``Mark.wait``."""
        self.event.synchronize()

    def hold_compute(self) -> None:
        """See ``Mark.hold_compute``."""
        self.event.wait(self._lane.compute)


class DeviceLane(Lane):
    """A stream on ``device`` with its own staging memory, shared by threads.

    Blocks whose bytes are contiguous are copied directly, all in one call of the driver's
    ``batch_copy``. Others go through staging memory: one copy for all consecutive pages, and one
    kernel that distributes or collects them, whatever the number of layers. No copy runs during
    the kernel before it: with two halves of staging memory and a second stream, loads would gain
    5 % at most (simulated device: 46 of 48.5 GB/s; H200: 50 of 55).

    ``urgent``: its copies and kernels run before those of other streams, such as the model's.
    """

    per_span = True

    def __init__(
        self,
        device: torch.device,
        driver: DeviceDriver,
        *,
        urgent: bool,
        seam_bytes: int = SEAM_BYTES,
    ) -> None:
        self.device = device
        self._driver, self._seam = driver, seam_bytes
        self._api = torch.get_device_module(device)
        self.stream = self._api.Stream(device, priority=_URGENT if urgent else _LEISURELY)
        self._lock = Lock()
        self._staging: torch.Tensor | None = None

    @property
    def compute(self) -> Any:
        """The stream that the calling thread computes on."""
        return self._api.current_stream(self.device)

    def adopt_thread(self) -> None:
        """Select the device: a new thread would open a context on device 0, for every rank."""
        self._api.set_device(self.device)

    def prepare(self, layers: PagedLayers) -> None:
        """See ``Lane.prepare``. Uses PyTorch's kernels if the driver's do not compile, for example
        because Triton finds no C compiler, and kernels if batched copies fail."""
        with self._lock, self._api.stream(self.stream):
            try:
                self._driver.kernels.prepare(layers)
            except Exception:
                logger.warning("kernels do not compile, using slower ones", exc_info=True)
                self._driver.kernels = PageKernels()
        if self._copies_blocks(layers):
            page = torch.empty(int(layers.nbytes.sum()), dtype=torch.uint8, pin_memory=True)
            first = np.zeros((1, 1), np.int64)
            try:
                self.gather(layers, first, page.numpy().data, first[0])
            except Exception:
                logger.warning("batched copies fail, using kernels", exc_info=True)
                self._driver.batch_copy = None
        self.mark().wait()

    def mark_compute(self) -> Mark:
        """See ``Lane.mark_compute``."""
        return self._recorded(self.compute)

    def follow(self, mark: Mark) -> None:
        """See ``Lane.follow``."""
        if isinstance(mark, DeviceMark):
            mark.event.wait(self.stream)

    def scatter(
        self,
        memory: memoryview,
        starts: Ints,
        layers: PagedLayers,
        ids: Ints,
        recast: Recast | None = None,
    ) -> None:
        """See ``Lane.scatter``."""
        blocks = ids.shape[1]
        assert recast is None or recast.blocks == blocks
        nbytes = layers.frame_bytes(blocks, recast)
        check_reach(memory, starts, nbytes, layers, ids)
        starts = starts + address_of(memory)
        with self._lock, self._api.stream(self.stream):
            if recast is None and self._copies_blocks(layers):
                self._copy(_whole_blocks(starts, layers, ids, self._seam), to_device=True)
                return
            for some, part in self._fitting(layers, nbytes, len(ids)):
                self._distribute(
                    starts[some, part], nbytes[part], layers.cut(part), ids[some], recast
                )

    def gather(self, layers: PagedLayers, ids: Ints, memory: memoryview, starts: Ints) -> None:
        """See ``Lane.gather``."""
        nbytes = layers.frame_bytes(ids.shape[1])
        check_reach(memory, starts, nbytes.sum(), layers, ids)
        first_layers = starts + address_of(memory)
        starts = first_layers[:, None] + offsets_of(nbytes)
        with self._lock, self._api.stream(self.stream):
            if self._copies_blocks(layers):
                self._copy(_whole_blocks(starts, layers, ids, self._seam), to_device=False)
                return
            for some, part in self._fitting(layers, nbytes, len(ids)):
                self._collect(starts[some, part], nbytes[part], layers.cut(part), ids[some])

    def mark(self) -> Mark:
        """See ``Lane.mark``."""
        with self._lock:
            return self._recorded(self.stream)

    def _recorded(self, stream: Any) -> DeviceMark:
        event = self._driver.event()
        event.record(stream)
        return DeviceMark(self, event)

    def _copies_blocks(self, layers: PagedLayers) -> bool:
        return (
            self._driver.batch_copy is not None
            and layers.has_whole_blocks
            and min(layers.nbytes) >= _BATCH_BYTES_MIN
        )

    def _fitting(
        self, layers: PagedLayers, nbytes: Ints, count: int
    ) -> Iterator[tuple[slice, range]]:
        """Divide ``count`` frames of each layer, of ``nbytes``, into parts that fit into staging
        memory, at least one frame each: which payloads, and which layers, all equal."""
        for run in layers.runs:
            each = int(nbytes[run.start])
            layers_max = max(1, _STAGING_BYTES_MAX // each)
            at_once = max(1, layers_max // len(run))
            for first in range(0, count, at_once):
                for layer in range(0, len(run), layers_max):
                    yield slice(first, first + at_once), run[layer : layer + layers_max]

    def _copy(self, copies: _Copies, *, to_device: bool) -> None:
        ours, theirs, nbytes = map(torch.from_numpy, copies)
        assert self._driver.batch_copy is not None
        if to_device:
            # The pages in the slab are complete, so they may be read before the stream gets there.
            self._driver.batch_copy(ours, theirs, nbytes, True)
        else:
            self._driver.batch_copy(theirs, ours, nbytes, False)

    def _distribute(
        self, starts: Ints, nbytes: Ints, layers: PagedLayers, ids: Ints, recast: Recast | None
    ) -> None:
        """Copy frames of equal layers to staging memory, and write them into blocks."""
        _, heads, tokens, content = layers.caches[0].shape
        if recast is None:
            recast = Recast((ids.shape[1], heads, tokens), (0, heads), 0, ids.shape[1])
        staged = self._staged(starts.size * int(nbytes[0]))
        host, places, sizes = _consecutive(starts, nbytes, self._seam)
        if self._driver.batch_copy is not None:
            self._copy((host, places + staged.data_ptr(), sizes), to_device=True)
        else:
            pieces = zip(host.tolist(), places.tolist(), sizes.tolist(), strict=True)
            for address, at, size in pieces:
                staged[at : at + size].copy_(_bytes_at(address, size), non_blocking=True)
        count, heads, frame_tokens = recast.frame
        frames = (*starts.shape, count, heads, frame_tokens or tokens, content)
        words = staged.view(layers.caches[0].dtype).view(frames)
        self._driver.kernels.scatter(words, layers, upload(ids, self.device), recast)

    def _collect(self, starts: Ints, nbytes: Ints, layers: PagedLayers, ids: Ints) -> None:
        """Copy blocks of equal layers to staging memory, and from there to ``starts``."""
        cache, chunk_bytes = layers.caches[0], int(nbytes.sum())
        staged = self._staged(len(ids) * chunk_bytes).view(len(ids), chunk_bytes)
        frames = (*starts.shape, ids.shape[1], *cache.shape[1:])
        words = staged.view(cache.dtype).view(frames)
        self._driver.kernels.gather(layers, upload(ids, self.device), words)
        for start, source in zip(starts[:, 0].tolist(), staged, strict=True):
            _bytes_at(start, chunk_bytes).copy_(source, non_blocking=True)

    def _staged(self, nbytes: int) -> torch.Tensor:
        """Return ``[nbytes]`` uint8 in device memory. Calls share it: work on a stream runs in
        order, so the next use writes after the previous one has read."""
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None  # free it first, so that both need not fit at once
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._staging[:nbytes]


def _whole_blocks(starts: Ints, layers: PagedLayers, ids: Ints, seam: int) -> _Copies:
    """Return the copies of whole blocks. Consecutive blocks that follow one another in memory are
    one. ``starts``: ``[n, layers]`` addresses of frames on the host. ``ids``: ``[n, blocks]``.
    ``seam``: copies end where the host's address is a multiple of it."""
    count, nbytes = ids.shape[1], layers.nbytes
    at, lengths = np.arange(ids.size), np.ones((ids.size, 1), np.int64)
    if layers.follows:
        at = run_starts(ids)
        lengths = np.diff(at, append=ids.size)[:, None]
    payload, block = np.divmod(at, count)
    host = starts[payload]
    host += block[:, None] * nbytes
    device = ids.reshape(-1)[at][:, None] * layers.strides
    device += layers.addresses
    copies = host.reshape(-1), device.reshape(-1), (lengths * nbytes).reshape(-1)
    # Few frames cross a seam. To look at all blocks would take longer than all the rest.
    crosses = starts % seam + count * nbytes > seam
    if not crosses.any():
        return copies
    return _cut(copies, np.flatnonzero(crosses[payload]), seam)


def _cut(copies: _Copies, some: Ints, seam: int) -> _Copies:
    """Cut some of the copies, whose numbers are given, where the host's address is a multiple of
    ``seam``. The rest of each is behind all copies."""
    host, device, sizes = copies
    left = seam - host[some] % seam
    crosses = sizes[some] > left
    some, left = some[crosses], left[crosses]
    if not len(some):
        return copies
    rest = host[some] + left, device[some] + left, sizes[some] - left
    sizes[some] = left
    host, device, sizes = map(np.concatenate, zip(copies, rest, strict=True))
    return _cut((host, device, sizes), np.arange(len(host) - len(some), len(host)), seam)


def _consecutive(starts: Ints, nbytes: Ints, seam: int) -> _Copies:
    """Return the copies of frames to one piece of memory, from its byte 0 on. Frames that follow
    one another are one copy, which ends at multiples of ``seam``."""
    begins, sizes = starts.reshape(-1), np.broadcast_to(nbytes, starts.shape).reshape(-1)
    gaps = np.flatnonzero(begins[1:] != begins[:-1] + sizes[:-1])
    firsts = np.concatenate(([0], gaps + 1))
    lengths = np.add.reduceat(sizes, firsts)
    pieces = begins[firsts], offsets_of(lengths), lengths
    return _cut(pieces, np.arange(len(firsts)), seam)


def _bytes_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def open_lane(device: torch.device, *, urgent: bool = False, seam_bytes: int = SEAM_BYTES) -> Lane:
    """Return a lane for caches on ``device``. ``urgent``: the forward pass may wait for its copies.
    ``seam_bytes``: see ``SEAM_BYTES``. Raises ``ConfigError`` for an unsupported device."""
    if device.type == "cpu":
        return Lane()
    return DeviceLane(device, driver_of(device), urgent=urgent, seam_bytes=seam_bytes)
