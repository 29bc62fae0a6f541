"""A picture of a soak: what engines held over time, and when faults were caused."""

from pathlib import Path
from typing import Any

PANELS = (
    ("rss_mib", "resident memory, MiB"),
    ("files", "open files and sockets"),
    ("slab_mib", "slabs, MiB"),
)
INK, FAINT = "#2b5c8a", "#c8553d"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write an SVG; of all engines that live at a moment, the largest value."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "soak", "none"
    times = [sample["at_s"] / 60 for sample in result["samples"]]
    figure, panels = plt.subplots(
        len(PANELS), 1, figsize=(8, 4.6), sharex=True, layout="constrained"
    )
    for panel, (name, title) in zip(panels, PANELS, strict=True):
        panel.plot(times, [round(one[name], 1) for one in result["samples"]], color=INK)
        if name == "slab_mib":
            leased = [sample["leased"] for sample in result["samples"]]
            panel.plot(times, leased, color=INK, linewidth=0.8, alpha=0.5)
            title = "slabs: MiB, and leased (thin)"
        panel.set_title(title, fontsize=8, loc="left")
        panel.set_ylim(bottom=0)
        panel.tick_params(labelsize=7)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    marks = [at / 60 for at, _ in result["events"]]
    panels[-1].plot(marks, [0] * len(marks), "|", color=FAINT, markersize=7, clip_on=False)
    panels[-1].set_xlabel("minutes; each tick below is a fault", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
