"""The plots of ``docs/scaling.md``. Only here matplotlib is needed (``objkv[plot]``)."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fleet.fleet import Admission, Fleet
from benchmarks.fleet.report import Summary
from benchmarks.fleet.sweep import Case, Runs, changed, scale_cases
from objkv.errors import pip_install

_STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "objkv",
}
_POINTS = 200
_REDIS_NODE_BYTES = 64e9
_HOUR_S = 3600


def write_plots(folder: Path, runs: Runs, fleet: Fleet) -> Iterator[Path]:
    """Simulate what is needed and write one SVG after the other; raises ``SystemExit`` without
    matplotlib."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as exc:
        raise SystemExit(f"plots need matplotlib: {pip_install('plot')}") from exc
    plt.rcParams.update(_STYLE)
    folder.mkdir(parents=True, exist_ok=True)
    drawings: tuple[Callable[[Any, Runs, Fleet], Any], ...] = (
        ttft, connections, models, admission, ttl, money, redis, limits,
    )  # fmt: skip
    for draw in drawings:
        figure = draw(plt, runs, fleet)
        path = folder / f"{draw.__name__}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        yield path


def ttft(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """Distribution of the time to the first token."""
    affine = replace(fleet, routing="affine")
    lines = {
        "no objkv": replace(fleet, shared=False),
        "objkv, S3 Standard": fleet,
        "objkv, S3 Standard, 24 connections": changed(fleet, s3_ranges_max=16),
        "objkv, LAN store": replace(fleet, bulk="lan"),
        "no objkv, prefix-affine routing": replace(affine, shared=False),
        "objkv, S3 Standard, prefix-affine routing": affine,
    }
    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for (name, case), dashes in zip(lines.items(), ["-", "-", ":", "-", "--", "--"], strict=True):
        times = sorted(runs.run(case).world.counts.ttft_s)
        shares = [(i + 0.5) / _POINTS for i in range(_POINTS)]
        axes.plot([times[int(share * len(times))] for share in shares], shares, dashes, label=name)
    axes.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests")
    axes.set_xlim(left=0.02)
    axes.set_title(f"{fleet.replicas} replicas of {fleet.model} (simulated)")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.15), ncols=2)
    return figure


def connections(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """How many connections a load needs before it pays."""
    counts = (8, 12, 16, 24, 32, 48, 64, 96, 128)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for bulk in runs.costs.bulk:
        found = []
        for count in counts:
            ranges = count - fleet.settings.load_threads
            case = changed(replace(fleet, bulk=bulk), s3_ranges_max=ranges)
            found.append(runs.summary(Case("", "", case)))
        bare = runs.summary(Case("", "", replace(fleet, shared=False))).ttft_mean_s
        left.plot(counts, [100 * summary.bulk for summary in found], "o-", label=bulk)
        right.plot(counts, [summary.ttft_mean_s / bare for summary in found], "o-", label=bulk)
    label = "load_threads + s3_ranges_max, per worker"
    left.set(xlabel=label, ylabel="prompt tokens loaded, %")
    right.set(xlabel=label, ylabel="mean TTFT, of no objkv", ylim=(0, 1.1))
    left.legend()
    return figure


def models(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """Which models gain, on which store."""
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    width = 0.8 / len(runs.costs.bulk)
    for i, bulk in enumerate(runs.costs.bulk):
        heights = []
        for model in runs.costs.models:
            case = replace(fleet, model=model, bulk=bulk)
            bare = runs.summary(Case("", "", replace(case, shared=False))).ttft_mean_s
            heights.append(runs.summary(Case("", "", case)).ttft_mean_s / bare)
        places = [place + i * width for place in range(len(heights))]
        axes.bar(places, heights, width, label=bulk)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks([p + width for p in range(len(runs.costs.models))], list(runs.costs.models))
    axes.set(ylabel="mean TTFT, of no objkv", ylim=(0, 1.25))
    axes.legend(ncols=3)
    return figure


def admission(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """What each admission is worth as the GPUs fill."""
    loads = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    rules: tuple[Admission, ...] = ("auto", "always", "alone")
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axes, model in zip(panels, ("llama-3.1-8b", "llama-3.1-70b"), strict=True):
        for rule in rules:
            ratios = []
            for load in loads:
                case = replace(fleet, load=load, model=model)
                bare = runs.summary(Case("", "", replace(case, shared=False))).ttft_mean_s
                summary = runs.summary(Case("", "", changed(case, admission=rule)))
                ratios.append(summary.ttft_mean_s / bare)
            name = f"{rule} (what if)" if rule == "alone" else rule
            axes.plot([100 * load for load in loads], ratios, "o-", label=name)
        axes.axhline(1, color="black", linewidth=1)
        axes.set(xlabel="GPUs busy with prompts if nothing is reused, %", title=model)
    panels[0].set(ylabel="mean TTFT, of no objkv")
    panels[1].legend()
    return figure


def ttl(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """What a shorter life or a smaller bucket costs in hits."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    lives = (30, 60, 120, 300, 600, 900, 1800, 3600)
    by_ttl = [runs.summary(Case("", "", changed(fleet, ttl_s=life))) for life in lives]
    left.plot([life / 60 for life in lives], [100 * s.bulk for s in by_ttl], "o-")
    left.set(xscale="log", xlabel="ttl_s, in minutes", ylabel="prompt tokens loaded, %")
    sizes = (0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
    quotas = [changed(fleet, quota_bytes=size * 1e12 * fleet.replicas) for size in sizes]
    right.plot(sizes, [100 * runs.summary(Case("", "", q)).bulk for q in quotas], "o-")
    right.set(xscale="log", xlabel="bytes kept per replica, TB (least used go first)")
    left.set_ylim(bottom=0)
    return figure


def money(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """Dollars to the store against dollars of GPU time, by chunk size."""
    chunks = (128, 256, 512, 1024, 2048)
    cases = [changed(fleet, chunk_tokens=chunk) for chunk in chunks]
    found = [runs.summary(Case("", "", case)) for case in cases]
    bulk = runs.costs.bulk[fleet.bulk]
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    names, bottom = [str(chunk) for chunk in chunks], [0.0] * len(chunks)
    parts: dict[str, Callable[[Summary], float]] = {
        "PUT": lambda s: 3600 * s.puts_s * bulk.put_usd,
        "GET": lambda s: 3600 * s.gets_s * bulk.get_usd,
        "storage, ttl_s 4 hours": lambda s: s.storage_usd,
    }
    for name, price in parts.items():
        heights = [price(summary) / summary.replicas for summary in found]
        axes.bar(names, heights, 0.5, bottom=bottom, label=name)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    saved = [summary.gpu_usd_saved / summary.replicas for summary in found]
    axes.plot(names, saved, "ko--", label="GPU time not used")
    axes.set(xlabel="chunk_tokens", ylabel="dollars per replica and hour, list prices")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def redis(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """Which commands Redis gets."""
    changes: dict[str, dict[str, Any]] = {
        "base": {},
        "no near-\ncache": {"near_records_max": 0},
        "near_ttl_ms\n300,000": {"near_ttl_ms": 300_000},
        "chunk\n512": {"chunk_tokens": 512},
        "chunk\n1,024": {"chunk_tokens": 1024},
        "chunk\n2,048": {"chunk_tokens": 2048},
    }
    found = [runs.summary(Case("", "", changed(fleet, **change))) for change in changes.values()]
    figure, axes = plt.subplots(figsize=(7.5, 3.6))
    bottom = [0.0] * len(found)
    parts: dict[str, Callable[[Summary], float]] = {
        "lookup": lambda s: s.redis_lookups_s,
        "touch": lambda s: s.redis_touches_s,
        "save: lease, publish, release": lambda s: s.redis_saves_s,
    }
    for name, rate in parts.items():
        heights = [rate(summary) / summary.requests_s for summary in found]
        axes.bar(list(changes), heights, 0.6, bottom=bottom, label=name)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set(ylabel="Redis commands per request")
    axes.legend()
    return figure


def limits(plt: Any, runs: Runs, fleet: Fleet) -> Any:
    """Demand against what one of each can do, as replicas grow."""
    times = (1, 2, 5, 10, 20, 50, 100, 200, 512, 1000)
    cases = [case for case in scale_cases(fleet, times) if "enough" in case.name]
    found = [runs.summary(case) for case in cases]
    hourly = [s.redis_bytes * _HOUR_S / fleet.settings.ttl_s for s in found]
    lines = {
        "S3 rate, one partition of the bucket": [s.prefixes for s in found],
        "Redis index, ttl_s 4 hours, 64 GB": [s.redis_bytes / _REDIS_NODE_BYTES for s in found],
        "Redis index, ttl_s 1 hour, 64 GB": [nbytes / _REDIS_NODE_BYTES for nbytes in hourly],
        "Redis time, one primary": [s.redis_busy for s in found],
        "network card of a host": [max(s.nic_receive, s.nic_send) for s in found],
    }
    figure, axes = plt.subplots(figsize=(7.5, 4.4))
    for name, demand in lines.items():
        axes.plot([s.replicas for s in found], demand, "o-", markersize=3, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel=f"replicas of {fleet.model}")
    axes.set(ylabel="demand, of the limit")
    axes.set_title("default settings (simulated)", fontsize=10)
    axes.legend(fontsize=8)
    return figure
