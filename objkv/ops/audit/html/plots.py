"""The page's plots as values: bars and axes to scale, drawn by ``plots.html``.

Each bar has a tooltip with its numbers, and each plot has a sentence for screen readers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil, floor, log10
from typing import Final

from objkv.ops.audit.report import AgeBucket, AuditReport
from objkv.ops.formats import brief, count, size, span

WIDTH: Final = 400
HEIGHT: Final = 190
LEFT, RIGHT, TOP, BOTTOM = 60, 4, 10, 26
HIGH: Final = HEIGHT - TOP - BOTTOM
_LABELS: Final = 9
_DEPTHS_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. Each part, from the bottom up, is a class of the stylesheet and a value."""

    label: str
    tip: str
    parts: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot for ``plots.html``, in units of its view box."""

    summary: str
    ticks: tuple[tuple[float, str], ...]
    """y and text, from the bottom up; empty without bars."""
    columns: tuple[tuple[float, float, str, tuple[tuple[str, float, float], ...]], ...] = ()
    """x, width, tooltip, and parts: class, y and height."""
    labels: tuple[tuple[float, str], ...] = ()
    """x and text below the axis."""


def ages(report: AuditReport) -> Plot:
    """Plot bytes by time since they were written and by time since they were last used."""
    used = {bucket.start_s: bucket for bucket in report.ages.last_use}
    bars: list[Bar] = []
    for written in report.ages.age:
        name = _bucket_name(written)
        bars.append(_age_bar(name, f"written {name} ago", "fill-b", written.nbytes, written.chunks))
        if used:
            other = used.get(written.start_s)
            found = (other.nbytes, other.chunks) if other else (0, 0)
            bars.append(_age_bar("", f"last used {name} ago", "fill-a", *found))
    never = report.ages.never_used_bytes
    if never is not None:
        unused = _age_bar("", "never used", "fill-c", never, report.ages.never_used_chunks)
        bars += [Bar("never", unused.tip, (("fill-none", 0.0),)), unused]
    summary = "Bytes by age and by last use. " + " ".join(f"{bar.tip}." for bar in bars)
    return _plot(bars, summary, axis=size, paired=bool(used))


def depths(report: AuditReport) -> Plot:
    """Plot used and unused chunks by their position in prompts, over all namespaces."""
    bars = []
    in_order = sorted(report.depths, key=lambda one: one.depth)
    for depth, found in groupby(in_order, key=lambda one: one.depth):
        rows = list(found)
        chunks = sum(row.chunks for row in rows)
        used = sum(row.used_chunks or 0 for row in rows)
        hits = sum(row.hits or 0 for row in rows)
        end = max(row.depth_end for row in rows)
        name = str(end) if end == depth + 1 else f"{depth + 1}–{end}"
        tip = f"chunk {name} of prompts: {count(chunks)} stored, {count(used)} used, "
        tip += f"{count(hits)} hits"
        bars.append(Bar(name, tip, (("fill-a", used), ("fill-c", max(0, chunks - used)))))
    summary = "Chunks by their position in prompts. " + " ".join(f"{bar.tip}." for bar in bars[:12])
    return _plot(bars[:_DEPTHS_SHOWN], summary, axis=brief)


def _bucket_name(bucket: AgeBucket) -> str:
    return f">{span(bucket.start_s)}" if bucket.end_s is None else f"<{span(bucket.end_s)}"


def _age_bar(label: str, what: str, fill: str, nbytes: int, chunks: int | None) -> Bar:
    return Bar(label, f"{what}: {size(nbytes)} in {count(chunks)} chunks", ((fill, nbytes),))


def _plot(
    bars: Sequence[Bar], summary: str, *, axis: Callable[[float], str], paired: bool = False
) -> Plot:
    """Lay out vertical bars on an axis; with ``paired``, the first bar of a pair has the label."""
    largest = max((sum(value for _, value in bar.parts) for bar in bars), default=0)
    if not largest:
        return Plot(summary, ())
    ticks = _ticks(largest, binary=axis is size)
    groups = ceil(len(bars) / (2 if paired else 1))
    step = (WIDTH - LEFT - RIGHT) / groups
    room = min(step * 0.82, 56.0)
    width = room / 2 - 1 if paired else room
    every = max(1, ceil(groups / _LABELS))
    columns, labels = [], []
    for number, bar in enumerate(bars):
        group, side = divmod(number, 2) if paired else (number, 0)
        middle = LEFT + step * (group + 0.5)
        parts, y = [], float(TOP + HIGH)
        for fill, value in bar.parts:
            tall = max(1.0, HIGH * value / ticks[-1]) if value else 0.0
            y -= tall
            parts.append((fill, y, tall))
        columns.append((middle - room / 2 + side * (width + 2), width, bar.tip, tuple(parts)))
        is_last = group == groups - 1 and groups <= 2 * _LABELS
        if not side and bar.label and (group % every == 0 or is_last):
            labels.append((middle, bar.label))
    scale = tuple((TOP + HIGH * (1 - tick / ticks[-1]), axis(tick)) for tick in ticks)
    return Plot(summary, scale, tuple(columns), tuple(labels))


def _ticks(largest: float, *, binary: bool) -> list[float]:
    """Return three to six round numbers from 0 to at least ``largest``."""
    unit = 1.0
    if binary:
        while largest / unit >= 1024:
            unit *= 1024
    largest /= unit
    rough = largest / 4
    power = 10.0 ** floor(log10(rough))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough)
    if unit == 1.0 and step < 1:
        step = 1.0
    return [unit * step * number for number in range(ceil(largest / step) + 1)]
