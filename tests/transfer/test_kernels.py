"""Kernels move the bytes that plain indexing moves, whatever the layout, and touch no others.

Triton's kernels run in its interpreter, and are compiled for GPUs that this machine lacks.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from objkv.transfer import kernels as module
from objkv.transfer.kernels import PageKernels, TritonKernels, page_kernels
from objkv.transfer.lanes import Lane, PagedLayers, Recast
from tests.support.device import ON_HOST
from tests.support.layouts import placed

pytestmark = ON_HOST
TRITON = Path(sys.prefix) / "triton"
"""``make setup`` installs Triton here, so that vLLM cannot import it: vLLM for the CPU disables
it, but each engine would be 90 MB larger and print pages of warnings when it ends."""
needs_triton = pytest.mark.skipif(
    find_spec("triton") is None and not TRITON.is_dir(), reason="Triton is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _triton() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("triton") is None:
            patch.syspath_prepend(TRITON)
        yield


Shape = tuple[int, int, int, int, int]
"""Layers, blocks, heads, block size, content."""


LAYOUTS = {
    "hnd": "LBHNC",
    "nhd": "LBNHC",
    "layers in blocks": "BLHNC",
    "layers in tokens": "BNLHC",
    "blocks in heads": "LHBNC",
    "words apart": "LBCHN",
}
FREQUENT = ("hnd", "nhd", "layers in blocks")
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def random_words(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.iinfo(dtype)
    return torch.randint(bounds.min, bounds.max, shape, dtype=dtype, generator=generator)


@dataclass
class Paged:
    """Layers of some layout in memory that is larger than they are."""

    layout: str
    shape: Shape
    dtype: torch.dtype = torch.int64
    padding: int = 0
    """Words around all content of a token and head, and before the first block."""
    seed: int = 0
    memory: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        *rest, content = self.shape
        wide = (*rest, content + 2 * self.padding)
        count = torch.Size(wide).numel()
        self.memory = random_words((count + 2 * self.padding,), self.dtype, self.seed)
        inner = self.memory[self.padding : self.padding + count]
        end = self.padding + content
        layers = placed(inner, LAYOUTS[self.layout], wide)
        self.layers = PagedLayers([cache[..., self.padding : end] for cache in layers])

    def twin(self) -> "Paged":
        return Paged(self.layout, self.shape, self.dtype, self.padding, self.seed)


def interpreted() -> PageKernels:
    """Triton's kernels in its interpreter. It is chosen when kernels are made, and adds names to
    their module, so that they come from a copy of it."""
    spec = spec_from_file_location("objkv_kernels_interpreted", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    # Triton imports this later, and fails if its own functions are not of the same kind.
    import_module("triton.experimental.gluon")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, spec.name, copy)
        spec.loader.exec_module(copy)
        kernels: PageKernels = copy.TritonKernels()
    return kernels


@pytest.fixture(scope="module", params=["torch", pytest.param("triton", marks=needs_triton)])
def kernels(request: pytest.FixtureRequest) -> PageKernels:
    return PageKernels() if request.param == "torch" else interpreted()


few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def paged_caches(draw: st.DrawFn) -> Paged:
    heads, size, content = draw(
        st.sampled_from([(1, 1, 1), (1, 16, 9), (2, 4, 6), (3, 5, 7), (4, 8, 16), (8, 2, 18)])
    )
    shape = (draw(st.integers(1, 3)), draw(st.integers(5, 9)), heads, size, content)
    dtype = draw(st.sampled_from(WORDS))
    return Paged(draw(st.sampled_from(sorted(LAYOUTS))), shape, dtype, draw(st.integers(0, 2)))


@few
@given(data=st.data())
def test_blocks_are_gathered_by_chunk_layer_and_block(
    kernels: PageKernels, data: st.DataObject
) -> None:
    paged = data.draw(paged_caches())
    kernels.prepare(paged.layers)  # which moves nothing
    layers, blocks, *page = paged.shape
    chunks, each = data.draw(st.sampled_from([(1, 1), (1, 5), (2, 2), (3, 1)]))
    ids = data.draw(st.permutations(range(blocks)))[: chunks * each]
    staged = torch.zeros(chunks, layers, each, *page, dtype=paged.dtype)
    kernels.gather(paged.layers, torch.tensor(ids), staged)
    for layer, cache in enumerate(paged.layers.caches):
        assert torch.equal(staged[:, layer].flatten(0, 1), cache[ids])
    assert torch.equal(paged.memory, paged.twin().memory)


@st.composite
def frames(draw: st.DrawFn, paged: Paged) -> tuple[torch.Tensor, Recast]:
    """Staged pages of any shape that a rank of this cache can take blocks from, and which ones."""
    layers, blocks, heads, size, content = paged.shape
    first = draw(st.integers(0, 3))
    count = draw(st.integers(1, min(4, blocks)))
    start = draw(st.integers(0, 2))
    width = start + heads + draw(st.integers(0, 2))
    given_size = draw(st.sampled_from([size, size, 2 * size, 3 * size, 1]))
    tokens = (first + count + draw(st.integers(0, 2))) * size
    given_blocks = -(-tokens // given_size)
    while given_blocks * given_size % size:
        given_blocks += 1
    shape = (layers, given_blocks, width, given_size, content)
    shape = (draw(st.integers(1, blocks // count)), *shape)
    staged = random_words(shape, paged.dtype, draw(st.integers(1, 9)))
    frame = given_blocks, width, given_size
    return staged, Recast(frame, (start, start + heads), first, count)


@few
@given(data=st.data())
def test_pages_of_any_shape_are_scattered_as_the_host_lane_does(
    kernels: PageKernels, data: st.DataObject
) -> None:
    paged = data.draw(paged_caches())
    staged, recast = data.draw(frames(paged))
    many = len(staged) * recast.blocks
    ids = np.array(data.draw(st.permutations(range(paged.shape[1])))[:many])
    expected = paged.twin()
    starts = np.arange(len(staged) * len(staged[0])) * staged[0, 0].nbytes
    memory = staged.view(torch.uint8).flatten().numpy().data
    Lane().scatter(
        memory,
        starts.reshape(staged.shape[:2]),
        expected.layers,
        ids.reshape(-1, recast.blocks),
        recast,
    )
    kernels.scatter(staged, paged.layers, torch.tensor(ids), recast)
    assert torch.equal(paged.memory, expected.memory)


def moved_and_back(kernels: PageKernels, paged: Paged, ids: list[int]) -> bool:
    layers, _, heads, size, content = paged.shape
    pages = random_words((layers, len(ids), heads, size, content), paged.dtype, seed=3)
    expected = paged.twin()
    for cache, given_pages in zip(expected.layers.caches, pages, strict=True):
        cache[ids] = given_pages
    placed = torch.tensor(ids)
    own = Recast((len(ids), heads, size), (0, heads), 0, len(ids))
    kernels.scatter(pages[None], paged.layers, placed, own)
    back = torch.zeros(1, *pages.shape, dtype=paged.dtype)
    kernels.gather(paged.layers, placed, back)
    return torch.equal(paged.memory, expected.memory) and torch.equal(back[0], pages)


@pytest.mark.parametrize("layout", FREQUENT)
@pytest.mark.parametrize(
    "page",
    [(8, 16, 64), (1, 64, 144), (2, 1024, 3), (1, 16, 128)],
    ids=["8 heads", "MLA", "blocks of 1,024 tokens", "one tile"],
)
def test_pages_of_several_tiles(
    kernels: PageKernels, layout: str, page: tuple[int, int, int]
) -> None:
    assert moved_and_back(kernels, Paged(layout, (2, 4, *page)), [3, 1])


@pytest.mark.parametrize("wide", ["block", "head", "token"])
def test_offsets_beyond_31_bits(kernels: PageKernels, wide: str) -> None:
    """Offsets exceed 31 bits although strides do not. The cache is of bytes, in 4 GiB. Zeros of
    numpy, unlike those of PyTorch, take no memory until they are written."""
    far = (1 << 30) + 7
    memory = torch.from_numpy(np.zeros(4 * far, dtype=np.uint8))
    strides = {"block": 64, "head": 16, "token": 4} | {wide: far}
    cache = memory.as_strided((4, 4, 4, 4), (*strides.values(), 1))
    layers = PagedLayers([cache])
    pages = random_words((1, 2, 4, 4, 4), torch.uint8, seed=5)
    ids = torch.tensor([3, 0])
    kernels.scatter(pages[None], layers, ids, Recast((2, 4, 4), (0, 4), 0, 2))
    assert torch.equal(cache[[3, 0]], pages[0])
    assert not cache[[1, 2]].any()
    back = torch.zeros(1, *pages.shape, dtype=torch.uint8)
    kernels.gather(layers, ids, back)
    assert torch.equal(back[0], pages)


def test_a_cut_of_the_layers_is_addressed_from_its_first(kernels: PageKernels) -> None:
    paged = Paged("layers in blocks", (4, 5, 2, 4, 6))
    staged = torch.zeros(1, 2, 2, 2, 4, 6, dtype=torch.int64)
    kernels.gather(paged.layers.cut(range(1, 3)), torch.tensor([4, 2]), staged)
    for at, layer in enumerate((1, 2)):
        assert torch.equal(staged[0, at], paged.layers.caches[layer][[4, 2]])


REFUSED = {
    "too few tokens": Recast((3, 2, 4), (0, 2), 2, 2),
    "heads that the frame lacks": Recast((3, 2, 4), (1, 3), 0, 2),
    "fewer heads than the cache has": Recast((3, 2, 4), (0, 1), 0, 2),
    "frames of another shape": Recast((3, 2, 2), (0, 2), 0, 2),
    "more blocks than ids": Recast((3, 2, 4), (0, 2), 0, 3),
    "fewer blocks than ids": Recast((3, 2, 4), (0, 2), 0, 1),
}


@needs_triton
@pytest.mark.parametrize("recast", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused_before_the_launch(recast: Recast) -> None:
    """A kernel would read or write other memory."""
    paged, ids = Paged("hnd", (1, 5, 2, 4, 6)), torch.tensor([1, 2])
    staged = torch.zeros(1, 1, 3, 2, 4, 6, dtype=torch.int64)
    with pytest.raises(AssertionError):
        TritonKernels().scatter(staged, paged.layers, ids, recast)
    for wrong in (
        torch.zeros(1, 1, 2, 2, 4, 6, dtype=torch.int32),
        torch.zeros(1, 1, 2, 4, 2, 6, dtype=torch.int64).transpose(3, 4),
        torch.zeros(1, 2, 2, 2, 4, 6, dtype=torch.int64),
        torch.zeros(1, 1, 1, 2, 4, 6, dtype=torch.int64),
        torch.zeros(1, 1, 2, 4, 2, 6, dtype=torch.int64),
    ):
        with pytest.raises(AssertionError):
            TritonKernels().gather(paged.layers, ids, wrong)


def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert type(page_kernels()) is PageKernels


@dataclass
class FakeGpu:
    """Stands for Triton's driver of a GPU: kernels are compiled for it, and launches are counted
    instead of run."""

    target: Any
    launches: list[tuple[str, int]] = field(default_factory=list)
    """Action and number of programs."""

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def launcher_cls(self, _source: Any, _metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *arguments: Any) -> None:
            form = arguments[-1]
            self.launches.append((form.action, x * y * z))

        return launch

    @property
    def utils(self) -> Any:
        return SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 1 << 16},
            load_binary=lambda *_: (None, 0, 0, 0, 1024),
        )


GPUS = {
    "A100": ("cuda", 80, 32),
    "H100": ("cuda", 90, 32),
    "B200": ("cuda", 100, 32),
    "MI300": ("hip", "gfx942", 64),
}


@pytest.fixture(params=GPUS.values(), ids=GPUS.keys())
def gpu(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A GPU that Triton compiles for. Compiled kernels are written below ``tmp_path``."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    gpu = FakeGpu(GPUTarget(*request.param))
    monkeypatch.setattr(type(driver), "active", property(lambda _: gpu))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # otherwise Triton 3.9 warns
    return gpu


@needs_triton
def test_a_call_is_one_launch_and_compiles_nothing(gpu: FakeGpu, tmp_path: Path) -> None:
    """Whatever varies between calls: counts, starts, and how tables are aligned."""
    paged, kernels = Paged("nhd", (5, 40, 2, 16, 64)), TritonKernels()
    kernels.prepare(paged.layers)
    assert gpu.launches == [("gather", 0), ("scatter", 0), ("recast", 0)]
    compiled = set(tmp_path.rglob("*"))
    gpu.launches.clear()
    calls = []
    for layers in (paged.layers, paged.layers.cut(range(1, 3)), paged.layers.cut(range(2, 5))):
        for count, first in ((1, 0), (2, 1), (3, 16), (16, 2), (17, 0)):
            ids = torch.arange(40)[first : first + count]
            many, page = len(layers), (2, 16, 64)
            kernels.gather(layers, ids, torch.empty(1, many, count, *page, dtype=torch.int64))
            kernels.gather(layers, ids, torch.empty(count, many, 1, *page, dtype=torch.int64))
            for action, heads, size in (("scatter", 2, 16), ("recast", 8, 16), ("recast", 2, 1)):
                frame = ((first + count) * 16 // size, heads, size)
                recast = Recast(frame, (heads - 2, heads), first, count)
                staged = torch.empty(1, many, *frame, 64, dtype=torch.int64)
                kernels.scatter(staged, layers, ids, recast)
                calls.append((action, count * many))
            calls[-3:-3] = [("gather", count * many)] * 2
    assert gpu.launches == calls
    assert set(tmp_path.rglob("*")) == compiled


ACCESS = re.compile(
    r"(?:ld|st)\.global(?:\.v(?P<items>\d))?\.b(?P<bits>\d+)"  # NVIDIA
    r"|(?:global|buffer)_(?:load|store)_(?P<unit>\w+?)(?:x(?P<units>\d))?\s"  # AMD
)


def access_bytes(assembly: str) -> Counter[int]:
    """Number of vector loads and stores by the bytes that a thread moves."""
    sizes = {"dword": 4, "short": 2, "ushort": 2, "byte": 1, "ubyte": 1}
    found: Counter[int] = Counter()
    for access in ACCESS.finditer(assembly):
        if access["bits"]:
            found[int(access["items"] or 1) * int(access["bits"]) // 8] += 1
        else:
            found[int(access["units"] or 1) * sizes[access["unit"]]] += 1
    return found


def compiled_access(paged: Paged, folder: Path) -> list[Counter[int]]:
    TritonKernels().prepare(paged.layers)
    listings = [*folder.rglob("*.ptx"), *folder.rglob("*.amdgcn")]
    assert len(listings) == 3
    return [access_bytes(listing.read_text()) for listing in listings]


@needs_triton
def test_layers_of_several_shapes_are_uploaded_before_the_first_request(gpu: FakeGpu) -> None:
    # An upload waits for its lane, and on the forward thread so for the whole forward pass.
    shapes = [(4, 2, 4, 6), (4, 2, 4, 8), (4, 2, 4, 8)]
    layers = PagedLayers([torch.zeros(shape, dtype=torch.int64) for shape in shapes])
    TritonKernels().prepare(layers)
    cut = layers.cut(range(1, 2)).pointers
    assert cut.untyped_storage().data_ptr() == layers.pointers.untyped_storage().data_ptr()


@needs_triton
@pytest.mark.parametrize("layout", FREQUENT)
@pytest.mark.parametrize("content", [64, 144], ids=["K and V of 128", "MLA"])
def test_each_thread_moves_16_bytes_at_once(
    gpu: FakeGpu, tmp_path: Path, layout: str, content: int
) -> None:
    """The compiler must know that words are adjacent and aligned, although addresses come from a
    table."""
    is_nvidia = gpu.target.backend == "cuda"  # AMD loads table entries by other instructions
    for widths in compiled_access(Paged(layout, (2, 4, 2, 16, content)), tmp_path):
        assert widths.pop(8, 0) == (2 if is_nvidia else 0)
        assert set(widths) == {16}


@needs_triton
@pytest.mark.parametrize("gpu", [GPUS["H100"]], ids=["H100"], indirect=True)
@pytest.mark.parametrize("misplaced", [0, 1], ids=["the first layer", "another layer"])
@pytest.mark.usefixtures("gpu")
def test_layers_at_odd_addresses_are_not_accessed_16_bytes_at_once(
    tmp_path: Path, misplaced: int
) -> None:
    """NVIDIA's GPUs refuse such an access. Pages in staging memory are aligned."""
    paged = Paged("hnd", (2, 4, 2, 16, 64))
    memory = torch.zeros(2 * 16 * 64 * 4 + 1, dtype=torch.int64)
    caches = list(paged.layers.caches)
    caches[misplaced] = memory[1:].view(4, 2, 16, 64)
    paged.layers = PagedLayers(caches)
    threads, table_entries = 128, 2
    for widths in compiled_access(paged, tmp_path):
        assert widths == {8: 2048 // threads + table_entries, 16: 2048 // 2 // threads}
