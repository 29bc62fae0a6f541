"""A picture in the making: boxes, arrows and words become one SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

STYLE = """
.objkv-picture {
  --pic-ink:#1c2733; --pic-quiet:#566473; --pic-line:#8fa0b1; --pic-soft:#f2f5f8;
  --pic-engine:#e7f0fa; --pic-engine-line:#2b6cb0; --pic-hot:#fdeee0; --pic-hot-line:#c2620e;
  --pic-bulk:#e6f4ea; --pic-bulk-line:#2f855a; --pic-warn:#b3261e;
}
@media (prefers-color-scheme: dark) {
  .objkv-picture {
    --pic-ink:#e6edf3; --pic-quiet:#9fb0c0; --pic-line:#64788b; --pic-soft:#1d2733;
    --pic-engine:#15304a; --pic-engine-line:#6cb2f2; --pic-hot:#402a16; --pic-hot-line:#f0a35c;
    --pic-bulk:#16352a; --pic-bulk-line:#6fcf97; --pic-warn:#ff8a80;
  }
}
text { fill:var(--pic-ink); font-family:"Segoe UI",system-ui,"DejaVu Sans",sans-serif }
.quiet { fill:var(--pic-quiet) }
.mono { font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace }
.soft { fill:var(--pic-soft); stroke:var(--pic-line) }
.engine { fill:var(--pic-engine); stroke:var(--pic-engine-line) }
.hot { fill:var(--pic-hot); stroke:var(--pic-hot-line) }
.bulk { fill:var(--pic-bulk); stroke:var(--pic-bulk-line) }
.arrow { fill:none; stroke:var(--pic-line); stroke-width:2 }
.arrow.hot { fill:none; stroke:var(--pic-hot-line) }
.arrow.bulk { fill:none; stroke:var(--pic-bulk-line) }
.arrow.engine { fill:none; stroke:var(--pic-engine-line) }
.arrow.warn { fill:none; stroke:var(--pic-warn) }
.dashed { stroke-dasharray:6 5 }
.tip { fill:var(--pic-line); stroke:none }
.tip.hot { fill:var(--pic-hot-line) }
.tip.bulk { fill:var(--pic-bulk-line) }
.tip.engine { fill:var(--pic-engine-line) }
.tip.warn { fill:var(--pic-warn) }
"""


@dataclass
class Picture:
    """One SVG in the making. ``kind`` everywhere is a class of ``STYLE``."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, at: Point, text: str, kind: str = "", size: float = 15, **more: str) -> None:
        """One line, from its left end, or around ``at`` with ``anchor="middle"``."""
        anchor = more.get("anchor", "start")
        weight = more.get("weight", "400")
        self.parts.append(
            f'<text x="{at[0]:g}" y="{at[1]:g}" class="{kind}" font-size="{size:g}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
        )

    def area(self, at: Point, size: Point, kind: str, radius: float = 8) -> None:
        """A rectangle with its left upper corner at ``at``."""
        self.parts.append(
            f'<rect x="{at[0]:g}" y="{at[1]:g}" width="{size[0]:g}" height="{size[1]:g}" '
            f'rx="{radius:g}" class="{kind}" stroke-width="1.5"/>'
        )

    def box(self, at: Point, size: Point, kind: str, lines: Sequence[str]) -> None:
        """An area with a bold first line and quiet others, centred."""
        self.area(at, size, kind)
        middle = at[0] + size[0] / 2
        top = at[1] + size[1] / 2 - (len(lines) - 1) * 10 + 5
        for number, line in enumerate(lines):
            first = number == 0
            self.text(
                (middle, top + number * 20),
                line,
                "" if first else "quiet",
                16 if first else 13.5,
                anchor="middle",
                weight="600" if first else "400",
            )

    def arrow(self, points: Sequence[Point], kind: str = "", dashed: bool = False) -> None:
        """A line through ``points`` with a tip at the last."""
        (x1, y1), (x2, y2) = points[-2:]
        length = math.hypot(x2 - x1, y2 - y1)
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        back = (x2 - 9 * ux, y2 - 9 * uy)
        path = " ".join(f"{x:g},{y:g}" for x, y in [*points[:-1], back])
        more = " dashed" if dashed else ""
        self.parts.append(f'<polyline points="{path}" class="arrow {kind}{more}"/>')
        wings = [(x2, y2), (x2 - 11 * ux - 5 * uy, y2 - 11 * uy + 5 * ux)]
        wings.append((x2 - 11 * ux + 5 * uy, y2 - 11 * uy - 5 * ux))
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in wings)
        self.parts.append(f'<polygon points="{corners}" class="tip {kind}"/>')

    def svg(self) -> str:
        """The file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="objkv-picture" role="img" '
                f'viewBox="0 0 {self.width} {self.height}" aria-label="{escape(self.title)}">',
                f"<style>{STYLE}</style>",
                f"<title>{escape(self.title)}</title>",
                *self.parts,
                "</svg>\n",
            ]
        )
