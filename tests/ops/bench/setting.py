"""A setting in which benchmarks run small, and quickly."""

from pathlib import Path

from objkv.assembly.backends import open_bulk, open_hot, open_index
from objkv.ops.bench.harness import BenchSetting, Factories
from objkv.telemetry import NullRecorder

RECORDER = NullRecorder()
FACTORIES = Factories(
    open_bulk=lambda config: open_bulk(config, RECORDER),
    open_hot=lambda config: open_hot(config, RECORDER),
    open_index=lambda config: open_index(config, RECORDER),
)


def quick(folder: Path, *, rounds: int = 1) -> BenchSetting:
    """Small sizes; nobody is told."""
    return BenchSetting(
        rounds=rounds,
        quick=True,
        folder=folder,
        factories=FACTORIES,
        tell=lambda name, stage: None,
        models=folder / "models",
    )
