"""What every benchmark is given: how much to do, how to open both ends, whom to tell."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from objkv.config import Config
from objkv.index.base import PruneIndex
from objkv.stores.base import PruneStore

Tell = Callable[[str, str], None]
"""``(what, stage)``; called whenever a stage begins."""


@dataclass(frozen=True, slots=True)
class Factories:
    """Open the ends as replicas do. Whoever calls one closes what it opened."""

    open_bulk: Callable[[Config], PruneStore]
    open_hot: Callable[[Config], PruneStore | None]
    open_index: Callable[[Config], PruneIndex]


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. ``folder`` is empty at first and gone afterwards: logs, a directory store."""

    rounds: int
    quick: bool
    """Small sizes: for a look at whether it works."""
    folder: Path
    factories: Factories
    tell: Tell
    models: Path
    """Folder in which models are made and kept."""
