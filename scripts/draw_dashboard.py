"""Draws the dashboard's panels from what a Prometheus has, for the documents: no Grafana is needed.

python scripts/draw_dashboard.py http://127.0.0.1:9090 --minutes 5 --out docs/images/dashboard.svg
"""

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

DASHBOARD = Path(__file__).parents[1] / "examples" / "monitoring" / "objkv-dashboard.json"
COLORS = ("#3b6ea8", "#2a9d8f", "#e9a23b", "#c8553d", "#7a5195", "#8d99ae")
INK, PALE = "#2b2f36", "#6b7280"
LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
UNITS = {"Bps": ("B/s", 1024), "bytes": ("B", 1024), "cps": ("/s", 1000), "s": ("s", 1000)}
Series = list[tuple[str, list[float], list[float]]]


def asked(url: str, path: str, **parameters: str) -> Any:
    """What Prometheus answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    query = urllib.parse.urlencode(parameters)
    with opener.open(f"{url}/api/v1/{path}?{query}", timeout=60) as response:
        return json.load(response)["data"]["result"]


def filled(expression: str) -> str:
    """The variables as Grafana fills them in for everything."""
    for name in ("$model", "$instance"):
        expression = expression.replace(name, ".*")
    return expression.replace("$__rate_interval", "30s")


def named(legend: str, labels: dict[str, str]) -> str:
    """The name of one line. Labels that it lacks are left out, as Grafana does."""
    return " ".join(LABEL.sub(lambda found: labels.get(found[1], ""), legend).split())


def series(url: str, panel: dict[str, Any], start: float, end: float) -> Series:
    """The lines of one panel."""
    found: Series = []
    for target in panel["targets"]:
        step = str(max(1.0, (end - start) / 200))
        rows = asked(
            url,
            "query_range",
            query=filled(target["expr"]),
            start=str(start),
            end=str(end),
            step=step,
        )
        for row in rows:
            name = named(target["legendFormat"], row["metric"])
            values = [float(value) for _, value in row["values"]]
            times = [(moment - start) / 60 for moment, _ in row["values"]]
            found.append((name, times, values))
    return found


def said(value: float, unit: str) -> str:
    """A number with its unit, short."""
    if math.isnan(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    name, base = UNITS.get(unit, ("", 1000))
    if unit == "s" and 0 < value < 1:
        return f"{1000 * value:.0f} ms"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < base or prefix == "T":
            text = f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"
            return f"{text} {prefix if base == 1000 else prefix.upper()}{name}".strip()
        value /= base
    return ""


def draw_number(axes: Any, panel: dict[str, Any], lines: Series) -> None:
    """A panel that is one number: its last value."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    known = [v for _, _, values in lines for v in values[-1:] if not math.isnan(v)]
    text = said(known[-1], unit) if known else "–"
    axes.text(0.5, 0.42, text, ha="center", va="center", fontsize=17, color=INK)
    axes.set_xticks([])
    axes.set_yticks([])


def draw_lines(axes: Any, panel: dict[str, Any], lines: Series) -> None:
    """A panel over time."""
    defaults = panel["fieldConfig"]["defaults"]
    shown = [line for line in lines if any(v > 0 for v in line[2])] or lines
    if "stacking" in defaults.get("custom", {}) and shown:
        moments = sorted({moment for _, times, _ in shown for moment in times})
        stacked = [
            [dict(zip(times, values, strict=True)).get(m, 0.0) for m in moments]
            for _, times, values in shown
        ]
        names = [name for name, *_ in shown]
        axes.stackplot(moments, stacked, labels=names, colors=COLORS, alpha=0.75, linewidth=0)
    else:
        for color, (name, times, values) in zip(COLORS * 9, shown, strict=False):
            axes.plot(times, values, label=name, color=color, linewidth=1.2)
    axes.set_ylim(bottom=0, top=1.05 * defaults["max"] if "max" in defaults else None)
    axes.yaxis.set_major_formatter(lambda value, _: said(value, defaults["unit"]))
    axes.tick_params(labelsize=6, colors=PALE, length=2)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    if any(name for name, *_ in shown):
        axes.legend(fontsize=5.5, frameon=False, loc="upper left", ncols=2, labelcolor=INK)


def draw(url: str, minutes: float, out: Path) -> None:
    """The whole dashboard, as one picture."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels)
    mpl.rcParams |= {"svg.hashsalt": "objkv", "font.size": 7}
    figure = Figure(figsize=(12, rows * 0.27), facecolor="white")
    end = time.time()
    for panel in panels:
        place = panel["gridPos"]
        left, width = place["x"] / 24, place["w"] / 24
        top, height = 1 - place["y"] / rows, place["h"] / rows
        if panel["type"] == "row":
            figure.text(0.012, top - height / 2, panel["title"], color=INK, weight="bold", size=9)
            continue
        margin = (0.045, 0.008, 0.022, 0.012)
        if panel["type"] == "stat":
            margin = (0.008, 0.008, 0.006, 0.012)
        axes = figure.add_axes(
            (
                left + margin[0],
                top - height + margin[2],
                width - margin[0] - margin[1],
                height - margin[2] - margin[3],
            )
        )
        axes.set_title(panel["title"], fontsize=7.5, color=INK, loc="left", pad=3)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_color("#d1d5db")
        lines = series(url, panel, end - 60 * minutes, end)
        (draw_number if panel["type"] == "stat" else draw_lines)(axes, panel, lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    draw(given.url, given.minutes, given.out)
