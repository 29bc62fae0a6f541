"""The page's plots: inline SVG with the stylesheet's colours, so that they suit light and dark.

Every bar says its numbers in a tooltip, and every plot in a sentence for who cannot see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from math import ceil, floor, log10
from typing import Final

from markupsafe import Markup

from objkv.ops.audit.html.figures import brief, count, size, span
from objkv.ops.audit.report import AgeBucket, AuditReport, DepthAudit

WIDTH: Final = 400
HEIGHT: Final = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 4, 10, 26
_DAYS_SHOWN: Final = 90
_LABELS: Final = 9
_DEPTHS_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: parts from the bottom up, with the stylesheet's class of each."""

    label: str
    tip: str
    parts: tuple[tuple[str, float], ...]

    @property
    def height(self) -> float:
        """Of all its parts."""
        return sum(value for _, value in self.parts)


def growth(report: AuditReport) -> Markup:
    """Bytes of today's store by the day they were written."""
    days = report.growth.days[-_DAYS_SHOWN:]
    days = tuple(dropwhile(lambda day: not day.nbytes, days))
    bars = [
        Bar(
            day.day[5:],
            f"{day.day}: {size(day.nbytes)} in {count(day.chunks)} chunks",
            (("fill-a", day.nbytes),),
        )
        for day in days
    ]
    most = max(days, key=lambda day: day.nbytes, default=None)
    told = "Bytes written by day. "
    if most is not None:
        told += f"{len(days)} days, {size(sum(day.nbytes for day in days))}; most on {most.day}: "
        told += f"{size(most.nbytes)}."
    return _columns(bars, told, axis=size)


def ages(report: AuditReport) -> Markup:
    """Bytes by how long ago they were written, beside those by how long ago they were used."""
    written, used = report.ages.age, {b.start_s: b for b in report.ages.last_use}
    bars: list[Bar] = []
    for bucket in written:
        name = _bucket_name(bucket)
        tip = f"written {name} ago: {size(bucket.nbytes)} in {count(bucket.chunks)} chunks"
        bars.append(Bar(name, tip, (("fill-b", bucket.nbytes),)))
        if used:
            other = used.get(bucket.start_s)
            nbytes, chunks = (other.nbytes, other.chunks) if other else (0, 0)
            tip = f"last used {name} ago: {size(nbytes)} in {count(chunks)} chunks"
            bars.append(Bar("", tip, (("fill-a", nbytes),)))
    never = report.ages.never_used_bytes
    if never is not None:
        tip = f"never used: {size(never)} in {count(report.ages.never_used_chunks)} chunks"
        bars += [Bar("never", tip, (("fill-none", 0.0),)), Bar("", tip, (("fill-c", never),))]
    told = "Bytes by age and by last use. " + " ".join(f"{bar.tip}." for bar in bars)
    return _columns(bars, told, axis=size, paired=bool(used))


def depths(report: AuditReport) -> Markup:
    """Chunks by their place in prompts, all namespaces together, used and never used."""
    found: dict[int, list[DepthAudit]] = {}
    for one in report.depths:
        found.setdefault(one.depth, []).append(one)
    bars = []
    for depth in sorted(found)[:_DEPTHS_SHOWN]:
        rows = found[depth]
        chunks = sum(row.chunks for row in rows)
        used = sum(row.used_chunks or 0 for row in rows)
        end = max(row.depth_end for row in rows) - 1
        name = str(depth + 1) if end == depth else f"{depth + 1}–{end + 1}"
        hits = sum(row.hits or 0 for row in rows)
        tip = f"chunk {name} of prompts: {count(chunks)} stored, {count(used)} used, "
        tip += f"{count(hits)} hits"
        bars.append(Bar(name, tip, (("fill-a", used), ("fill-c", max(0, chunks - used)))))
    told = "Chunks by their place in prompts. " + " ".join(f"{bar.tip}." for bar in bars[:12])
    return _columns(bars, told, axis=brief)


def _bucket_name(bucket: AgeBucket) -> str:
    if bucket.end_s is None:
        return f">{_tight(bucket.start_s)}"
    return f"<{_tight(bucket.end_s)}"


def _tight(seconds: int) -> str:
    return span(seconds).replace(" ", "\N{NARROW NO-BREAK SPACE}")


def _columns(bars: Sequence[Bar], told: str, *, axis: object, paired: bool = False) -> Markup:
    """Vertical bars on an axis; ``paired``: two by two, of which the first has the label."""
    if not any(bar.height for bar in bars):
        return Markup('<p class="empty">Nothing to draw yet.</p>')
    assert callable(axis)
    ticks = _ticks(max(bar.height for bar in bars), binary=axis is size)
    top = ticks[-1]
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    out = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        WIDTH, HEIGHT, told
    )]  # fmt: skip
    for tick in ticks:
        y = _TOP + high * (1 - tick / top)
        out.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>'
                '<text class="axis" text-anchor="end" x="{}" y="{:.1f}">{}</text>'
            ).format(_LEFT, WIDTH - _RIGHT, y, y, _LEFT - 8, y + 4, axis(tick))
        )
    groups = ceil(len(bars) / (2 if paired else 1))
    step = wide / groups
    room = min(step * 0.82, 56.0)
    width = room / 2 - 1 if paired else room
    every = max(1, ceil(groups / _LABELS))
    for number, bar in enumerate(bars):
        group, side = divmod(number, 2) if paired else (number, 0)
        middle = _LEFT + step * (group + 0.5)
        x = middle - room / 2 + side * (width + 2)
        out.append(_bar(bar, x, width, (high, top)))
        last = group == groups - 1
        if not side and bar.label and (group % every == 0 or (last and groups <= 2 * _LABELS)):
            out.append(
                Markup('<text class="axis" text-anchor="middle" x="{:.1f}" y="{}">{}</text>')
                .format(middle, HEIGHT - 8, bar.label)
            )  # fmt: skip
    out.append(Markup("</svg>"))
    return Markup("").join(out)


def _bar(bar: Bar, x: float, width: float, scale: tuple[float, float]) -> Markup:
    high, top = scale
    out = [Markup("<g><title>{}</title>").format(bar.tip)]
    base = _TOP + high
    # All of the column answers to the mouse: a bar of nearly nothing could not be pointed at.
    out.append(
        Markup('<rect class="touch" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
            x, _TOP, width, high
        )
    )
    for name, value in bar.parts:
        tall = max(1.0, high * value / top) if value else 0.0
        base -= tall
        out.append(
            Markup(
                '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="{}"/>'
            ).format(name, x, base, width, tall, 2 if width > 6 and tall > 4 else 0)
        )
    out.append(Markup("</g>"))
    return Markup("").join(out)


def _ticks(largest: float, *, binary: bool) -> list[float]:
    """Round numbers from 0 to at least ``largest``, three to six of them."""
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
