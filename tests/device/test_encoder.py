"""The encoder cache on a device: the bytes are right whatever is late, and the forward thread waits
for nothing."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from time import monotonic, sleep
from types import ModuleType
from typing import Any

import pytest
import torch

from objkv.connector.encoder import worker as encoder_worker
from objkv.connector.encoder.items import EncoderOutput, EncoderPlan
from objkv.connector.encoder.worker import EncoderWorkerSide, OutputCopies
from objkv.telemetry import MemoryRecorder
from tests.connector.encoder import world
from tests.connector.encoder.world import (
    IDENTITY,
    Place,
    Replica,
    replica,
    request,
)
from tests.device import simulated
from tests.device.simulated import calls

DEVICE = "sim:1"
"""Not the first one, on which every thread starts."""
ROWS, WIDTH = 64, 1024
FORM = {"width": lambda modality: WIDTH}
NAMES = [f"image{number}" for number in range(6)]
LATE = (3000, 8000)
ON_TIME = (0, 0)


@pytest.fixture(autouse=True)
def api(sim: ModuleType) -> Iterator[Any]:
    """``torch.sim``. This thread computes on ``DEVICE``, as a worker of vLLM does."""
    module = torch.get_device_module("sim")
    module.set_device(DEVICE)
    yield module
    module.set_device("sim:0")


@pytest.fixture
def place() -> Place:
    return Place()


def started(place: Place, device: str = DEVICE) -> AbstractContextManager[Replica]:
    return replica(place, form=FORM, device=device)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    simulated.hold(stream)
    try:
        yield
    finally:
        simulated.hold(stream, on=False)


def output_of(name: str) -> torch.Tensor:
    return world.output_of(name, ROWS, WIDTH)


def loading(names: list[str]) -> EncoderPlan:
    output = EncoderOutput(IDENTITY.namespace(), b"n" * 20, ROWS, WIDTH, "BF16")
    pages = (output_of(name).view(torch.uint8).view(-1).numpy().copy() for name in names)
    return EncoderPlan({name: (output, one) for name, one in zip(names, pages, strict=True)})


def worker(copies: OutputCopies) -> EncoderWorkerSide:
    """One that saves nothing."""
    return EncoderWorkerSide(copies, None, world.CONFIG, MemoryRecorder(), 0, 0)


def encode(one: Replica, *names: str) -> None:
    seen = request("a", *names, embeds=ROWS)
    one.wait(seen)
    for index in range(len(names)):
        one.side.allocate(seen, index)
    plan = one.plan(1)
    for name in names:
        half = (output_of(name) / 2).pin_memory().to(DEVICE, non_blocking=True)
        one.cache[name] = half + half
        one.worker.save(plan, one.cache, name)


def stored(place: Place, name: str) -> torch.Tensor:
    with started(place, "cpu") as other:
        assert other.see(request("b", name, embeds=ROWS)) == [], "not saved"
        return other.cache[name]


FORWARD, SAVES = "MainThread", "objkv-save-outputs"
WAITS = {"synchronize", "h2d pageable", "h2d blocking", "d2h pageable", "d2h blocking"}


@pytest.mark.parametrize("compute", [ON_TIME, LATE])
@pytest.mark.parametrize("saves", [ON_TIME, LATE])
def test_loaded_outputs_are_right_and_the_forward_thread_waits_for_nothing(
    compute: tuple[int, int], saves: tuple[int, int], api: Any
) -> None:
    copies, cache = OutputCopies(torch.device(DEVICE)), dict[str, torch.Tensor]()
    side, plan = worker(copies), loading(NAMES)
    simulated.slow(api.current_stream(), *compute)
    simulated.slow(copies.stream, *saves)
    simulated.counts()
    side.load(plan, cache)
    for _, pages in plan.loads.values():
        pages[:] = 0  # the message's memory is reused
    read = [cache[name] + 0 for name in NAMES]
    spent = calls(simulated.counts(), FORWARD)
    assert spent["h2d"] == len(NAMES)
    assert not WAITS & spent.keys()
    for name, tensor in zip(NAMES, read, strict=True):
        assert torch.equal(tensor.cpu(), output_of(name)), name


def test_a_step_without_loads_and_saves_calls_no_driver() -> None:
    side, nothing = worker(OutputCopies(torch.device(DEVICE))), EncoderPlan()
    encoded = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    simulated.counts()
    side.load(nothing, {"x": encoded})
    side.save(nothing, {"x": encoded}, "x")
    assert not simulated.counts()


def test_without_page_locked_memory_loads_block_but_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM relies on an output that was promised."""
    empty = torch.empty

    def refuse(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("out of memory")
        return empty(*args, **more)

    side, cache = worker(OutputCopies(torch.device(DEVICE))), dict[str, torch.Tensor]()
    monkeypatch.setattr(torch, "empty", refuse)
    side.load(loading(NAMES), cache)
    monkeypatch.undo()
    for name in NAMES:
        assert torch.equal(cache[name].cpu(), output_of(name)), name
    assert caplog.text.count("page-locking failed") == 1


@pytest.mark.parametrize("compute", [ON_TIME, LATE])
@pytest.mark.parametrize("saves", [ON_TIME, LATE])
def test_saved_outputs_are_right_and_the_forward_thread_waits_for_nothing(
    place: Place,
    compute: tuple[int, int],
    saves: tuple[int, int],
    api: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selected, to_host = set[int](), OutputCopies.to_host

    def spied(*args: Any) -> None:
        to_host(*args)
        selected.add(api.current_device())

    monkeypatch.setattr(OutputCopies, "to_host", spied)
    with started(place) as one, monkeypatch.context() as later:
        # PyTorch hands out a few in turn, so a new one may be the one that loads are copied on.
        later.setattr(api, "Stream", None)
        simulated.slow(api.current_stream(), *compute)
        simulated.slow(one.copies.stream, *saves)
        simulated.counts()
        encode(one, *NAMES)
        one.drain()
        spent = simulated.counts()
        assert (one.saved, one.count("save_errors")) == (len(NAMES), 0)
    assert not WAITS & calls(spent, FORWARD).keys()
    assert calls(spent, SAVES)["d2h"] == len(NAMES)
    assert not WAITS & calls(spent, SAVES).keys()
    assert selected == {1}, "a thread that selects none opens a context on the first device"
    simulated.relax()
    for name in NAMES:
        assert torch.equal(stored(place, name), output_of(name)), name


def test_rows_that_do_not_follow_each_other_are_saved_in_order(place: Place) -> None:
    rows = output_of("x")
    apart = torch.stack([rows, torch.zeros_like(rows)], dim=1).to(DEVICE)[:, 0]
    with started(place) as one:
        simulated.slow(one.copies.stream, *LATE)
        seen = request("a", "x", embeds=ROWS)
        one.wait(seen)
        one.side.allocate(seen, 0)
        simulated.counts()
        one.worker.save(one.plan(1), {"x": apart}, "x")
        one.drain()
        assert not WAITS & calls(simulated.counts(), SAVES).keys()
    assert torch.equal(stored(place, "x"), rows)


def test_the_model_does_not_wait_for_saves(place: Place, api: Any) -> None:
    with started(place) as one:
        with held(one.copies.stream):
            encode(one, "x")
            computed = api.Event()
            computed.record(api.current_stream())
            end = monotonic() + 10
            while not computed.query():
                assert monotonic() < end, "the compute stream waits for a copy"
                sleep(0.001)
            assert one.saved == 0
        one.drain()
        assert one.saved == 1


def test_a_device_that_hangs_costs_the_save(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy may end later, and its memory is not reused before."""
    monkeypatch.setattr(encoder_worker, "_COPY_S_MAX", 0.01)
    with started(place) as one:
        with held(one.copies.stream):
            encode(one, "x")
            one.drain()
            assert (one.saved, one.count("save_errors")) == (0, 1)
            del one.cache["x"]
            others = [torch.zeros(ROWS * WIDTH * 2, pin_memory=True) for _ in range(4)]
        monkeypatch.undo()
        encode(one, "x")
        one.drain()
        assert one.saved == 1
        assert not any(other.any() for other in others)
    assert torch.equal(stored(place, "x"), output_of("x"))
