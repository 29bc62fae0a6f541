"""``bench gpu``: loads and saves of a paged cache on a GPU, along with a model's steps, against
copies from page-locked memory.

``objkv.connector.programs.bench_gpu`` measures in a process of its own, and its output is defined
here. It can also measure the simulated device of the source tree, which models a GPU's time.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from objkv.errors import ConfigError
from objkv.ops.bench.harness import BenchRow, BenchSetting, Compared, Section, Target, Timings
from objkv.ops.programs import Program

SIMULATED: Final = "sim"
"""The simulated device, as PyTorch knows it."""
FORMS: Final = ("NHD", "HND")
"""Orders of heads and tokens in a block. FlashAttention's is NHD, where a head's tokens are not
contiguous."""
ORDERS: Final = ("consecutive", "scattered")
"""Places of a prompt's blocks in the paged cache. On a busy server they are scattered."""
STEP_MS, BUSY_STEP_MS = 10, 30
"""Length of the steps that run during one long load, and of those that each start a short one."""
LOAD = Target(0.9)
FORWARD_US = Target(200, at_most=True, of="ours")
STEP = Target(1.02, at_most=True)
_BOUND_S = 600.0
_CHUNKS = 128
_QUICK_CHUNKS = 8
_SOURCE = "tests/device/simulated.py"


class GpuAnswer(BaseModel):
    """The output of the program: what it moved, and seconds by side, one per round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    chunk_bytes: int
    loaded: int
    """Chunks of the long load."""
    saved: int
    """Chunks that one step saves."""
    loaded_by_step: int
    """Chunks that each of the busy steps loads."""
    seconds: Mapping[str, Sequence[float]]
    """On the device, for each form: plain copies of the long load's bytes (``NHD to_device``,
    ``NHD to_host``), loads and gathers for each order (``NHD load scattered``). On the device: a
    ``step`` alone, a ``step beside`` the long load, and that ``load beside`` steps. Until it is
    reported: the ``busy load`` of one of the busy steps. Processor time of the forward thread:
    ``forward load``, ``forward save``, and ``forward idle``, a step without transfers."""


def simulated_source() -> Path:
    """Return the root of the source tree. Raises ``ConfigError`` outside of it."""
    root = Path(__file__).parents[3]
    if not (root / _SOURCE).is_file():
        raise ConfigError("the simulated device is in a clone of the project only: run this there")
    return root


def bench_gpu(setting: BenchSetting) -> Section:
    """Measure this machine's GPU. Skipped without one. Raises ``ProgramFailed``."""
    return _bench(setting, "gpu")


def bench_simulated(setting: BenchSetting) -> Section:
    """Measure the simulated device. Raises ``ProgramFailed``, and ``ConfigError`` without it."""
    simulated_source()
    return _bench(setting, SIMULATED)


def _bench(setting: BenchSetting, kind: str) -> Section:
    if find_spec("torch") is None:
        return _skipped("no GPU here: torch is not installed")
    setting.tell("GPU" if kind != SIMULATED else "simulated GPU", "measuring")
    answer = measure_device(kind, setting.folder, rounds=setting.rounds, quick=setting.quick)
    if answer is None:
        return _skipped("no GPU here")
    prefix = "simulated: " if kind == SIMULATED else ""
    return Section("gpu", tuple(rows_of(answer, prefix)), {"GPU": answer.device})


def measure_device(kind: str, logs: Path, *, rounds: int, quick: bool) -> GpuAnswer | None:
    """Measure a device in a child process; None if there is none of this kind. Raises
    ``ProgramFailed``."""
    words = (kind, str(_QUICK_CHUNKS if quick else _CHUNKS), str(rounds))
    arguments = ("-m", "objkv.connector.programs.bench_gpu", *words)
    with Program("the GPU process", arguments, logs / "gpu.log", {}) as program:
        lines = list(program.lines(bound_s=_BOUND_S))
    return GpuAnswer.model_validate_json(lines[-1]) if lines else None


def rows_of(answer: GpuAnswer, prefix: str = "") -> Iterator[BenchRow]:
    """Yield one row per measurement. ``prefix``: of all names."""
    loaded, saved = answer.loaded * answer.chunk_bytes, answer.saved * answer.chunk_bytes
    timings = _with_limits(answer)
    up, down = "plain copy, host to device", "plain copy, device to host"
    for form in FORMS:
        for order in ORDERS:
            load = Compared(timings, f"{form} load {order}", f"{form} to_device", up)
            yield load.throughput(f"{prefix}load, {form}, {order} blocks", loaded, LOAD)
        for order in ORDERS:
            gather = Compared(timings, f"{form} gather {order}", f"{form} save limit", down)
            yield gather.throughput(f"{prefix}save, {form}, {order} blocks", saved)
    beside = Compared(timings, "load beside", f"{FORMS[0]} to_device", up)
    yield beside.throughput(f"{prefix}load while steps compute", loaded, LOAD)
    step = Compared(timings, "step beside", "step", "the same steps alone")
    yield step.duration(f"{prefix}step during a load of {answer.loaded} chunks", "ms", STEP)
    busy = Compared(timings, "busy load", "busy limit", "the step before it, and a plain copy")
    yield busy.duration(
        f"{prefix}load of {answer.loaded_by_step} chunks in each step of {BUSY_STEP_MS} ms",
        "ms",
        detail="from its step's start until it is reported",
    )
    yield from _forward_rows(timings, answer, prefix)


def _with_limits(answer: GpuAnswer) -> Timings:
    """Add the time of plain copies of the bytes that one step saves, and that one of the busy steps
    loads. Those begin when the step before has ended, because it may still write their blocks."""
    seconds = dict(answer.seconds)
    for form in FORMS:
        share = answer.saved / answer.loaded
        seconds[f"{form} save limit"] = [s * share for s in seconds[f"{form} to_host"]]
    share = answer.loaded_by_step / answer.loaded
    seconds["busy limit"] = [
        BUSY_STEP_MS / 1e3 + s * share for s in seconds[f"{FORMS[0]} to_device"]
    ]
    return Timings(seconds)


def _forward_rows(timings: Timings, answer: GpuAnswer, prefix: str) -> Iterator[BenchRow]:
    sides = {
        "load": f"load of {answer.loaded} chunks: start and outcome",
        "save": f"save of {answer.saved} chunks",
        "idle": "step without transfers",
    }
    for side, what in sides.items():
        yield BenchRow(
            f"{prefix}forward thread, {what}",
            "µs",
            timings.median(f"forward {side}") * 1e6,
            target=FORWARD_US if side == "load" else None,
            detail="processor time",
        )


def _skipped(note: str) -> Section:
    return Section("gpu", (), {}, (note,), skipped=True)
