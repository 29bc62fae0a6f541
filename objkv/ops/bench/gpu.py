"""``bench gpu``: chunks between host memory and a paged cache on a GPU, against pinned copies."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from pydantic import BaseModel, ConfigDict

from objkv.ops.bench.harness import BenchRow, BenchSetting, Compared, Section, Target, Timings
from objkv.ops.programs import Program

LOAD = Target(0.85)
OVERLAP = Target(0.80, of="ours")
_BOUND_S = 600.0
_CHUNKS = 32
_QUICK_CHUNKS = 2


class GpuAnswer(BaseModel):
    """The output of ``objkv.connector.programs.bench_gpu``: seconds by side, one per round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    nbytes: int
    """Bytes that each side moved per round."""
    seconds: Mapping[str, Sequence[float]]
    """``to_device`` and ``to_host`` are the limits; ``both`` is load and compute at once. The
    others are ``load``, ``gather`` and ``compute``."""


def bench_gpu(setting: BenchSetting) -> Section:
    """Measure loads, saves, and the overlap of loading and computing. Skipped without a GPU.

    Raises ``ProgramFailed`` if the GPU process fails.
    """
    if find_spec("torch") is None:
        return _skipped("no GPU here: torch is not installed")
    setting.tell("GPU", "measuring")
    answer = measure_device(setting, "cuda")
    if answer is None:
        return _skipped("no GPU here")
    return Section("gpu", rows_of(answer), {"GPU": answer.device})


def measure_device(setting: BenchSetting, device: str) -> GpuAnswer | None:
    """Measure ``device`` in a child process; None if the device does not exist."""
    chunks = _QUICK_CHUNKS if setting.quick else _CHUNKS
    words = (device, str(chunks), str(setting.rounds))
    arguments = ("-m", "objkv.connector.programs.bench_gpu", *words)
    with Program("the GPU process", arguments, setting.folder / "gpu.log", {}) as program:
        lines = list(program.lines(bound_s=_BOUND_S))
    return GpuAnswer.model_validate_json(lines[-1]) if lines else None


def rows_of(answer: GpuAnswer) -> tuple[BenchRow, ...]:
    """Return one row per measurement."""
    timings = Timings(answer.seconds)
    load = Compared(timings, "load", "to_device", "pinned copy, host to device")
    gather = Compared(timings, "gather", "to_host", "pinned copy, device to host")
    hidden = [
        hidden_share(load_s, compute_s, both_s)
        for load_s, compute_s, both_s in zip(
            *(answer.seconds[name] for name in ("load", "compute", "both")), strict=True
        )
    ]
    return (
        load.throughput("host to paged cache, verified", answer.nbytes, LOAD),
        gather.throughput("paged cache to host", answer.nbytes),
        BenchRow(
            "share of the smaller of load and compute that overlaps",
            "of 1",
            sorted(hidden)[len(hidden) // 2],
            target=OVERLAP,
        ),
    )


def hidden_share(load_s: float, compute_s: float, both_s: float) -> float:
    """Return the hidden share of the shorter duration when both run at once: 1 is all of it."""
    return max(0.0, min(1.0, (load_s + compute_s - both_s) / min(load_s, compute_s)))


def _skipped(note: str) -> Section:
    return Section("gpu", (), {}, (note,), skipped=True)
