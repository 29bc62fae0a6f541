"""A setting in which benchmarks run small, and quickly."""

from pathlib import Path

from benchmarks.harness import BenchSetting


def quick(folder: Path, *, rounds: int = 1) -> BenchSetting:
    return BenchSetting(rounds, True, folder, lambda name, stage: None, folder / "models")
