"""``objkv size``: an estimate of what a fleet stores, requests and pays."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from objkv.cache.worth import ChunkCost, PutRule
from objkv.cli.command import FINE, Session, command
from objkv.cli.options import time_option
from objkv.cli.output import Printer, counted, plain
from objkv.config.prices import LIST_PRICES, RANGE_BYTES, prices_of
from objkv.errors import ConfigError
from objkv.ops.formats import count
from objkv.ops.formats import size as bytes_text
from objkv.ops.models.layers import KV_DTYPES
from objkv.ops.size.sizing import (
    PRESETS,
    ChunkSizing,
    Load,
    ModelShape,
    ReplicaLayout,
    Sizing,
    preset,
    read_model,
    size_fleet,
)

_GIGABIT = 1e9 / 8
_LARGE = 1_000


Model = Annotated[
    str | None,
    typer.Option(help="Directory with a config.json, or a name from --list.", metavar="MODEL"),
]
Listing = Annotated[bool, typer.Option("--list", help="List the built-in model names.")]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="Same value as vLLM's --kv-cache-dtype. Default: the model's dtype.", metavar="DTYPE"
    ),
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor parallel size.", metavar="N")]
BlockSize = Annotated[int, typer.Option(min=1, help="vLLM's block size in tokens.", metavar="N")]
CodecRatio = Annotated[
    float,
    typer.Option(
        min=0.1, max=100, help="Measured ratio of raw bytes to stored bytes.", metavar="R"
    ),
]
Rate = Annotated[
    float,
    typer.Option(min=0, max=1e9, help="Prompts per second across the whole fleet.", metavar="N"),
]
PromptTokens = Annotated[
    int, typer.Option(min=1, help="Average prompt length in tokens.", metavar="N")
]
StoredShare = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Average share of a prompt that is already stored.", metavar="SHARE"
    ),
]
Ttl = Annotated[
    float | None, time_option("Time to live instead of the setting ttl_s", "--ttl", least=1)
]
Used = Annotated[
    float, time_option("Average time from a save to its last hit", "--used", most=1e10, shown="0s")
]
SweepEvery = Annotated[
    float, time_option("Time between sweeps", "--sweep-every", most=1e10, shown="1h")
]


@command
def size(
    session: Session,
    model: Model = None,
    list_models: Listing = False,
    kv_dtype: KvDtype = None,
    tp: Tp = 1,
    block_size: BlockSize = 16,
    codec_ratio: CodecRatio = 1.0,
    rate: Rate = 1.0,
    prompt_tokens: PromptTokens = 4096,
    stored: StoredShare = 0.5,
    ttl: Ttl = None,
    used: Used = 0.0,
    sweep_every: SweepEvery = 3_600.0,
) -> int:
    """Estimate a fleet's storage, request rate and cost.

    The estimate opens no connection.
    """
    if list_models:
        _print_presets(session.out)
        return FINE
    config = session.config
    has_redis = config.index_url.startswith("redis")
    layout = ReplicaLayout(
        chunk_tokens=config.chunk_tokens,
        block_size=block_size,
        tp_size=tp,
        codec_ratio=codec_ratio,
        hot_save_bytes_max=config.hot_save_bytes_max if has_redis else 0,
    )
    ttl_s = config.ttl_s if ttl is None else int(ttl)
    grace_s = config.sweep_grace_s
    load = Load(rate, prompt_tokens, stored, ttl_s, used, sweep_every, grace_s)
    prices = prices_of(config, folder=LIST_PRICES)
    found = size_fleet(_shape(model, kv_dtype), layout, load, prices)
    if session.out.machine:
        document = {**plain(found), "month": found.month}
        session.out.document({"sizing": document, "layout": layout, "load": load, "prices": prices})
    else:
        rule = replace(
            PutRule.of(config), prices=prices, life_s=max(ttl_s, grace_s) + sweep_every / 2
        )
        _print(session.out, found, layout, load, rule)
    return FINE


def _shape(model: str | None, kv_dtype: str | None) -> ModelShape:
    kv_dtype = None if kv_dtype == "auto" else kv_dtype
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype {kv_dtype}: choose auto, {', '.join(KV_DTYPES)}")
    if model is None:
        raise ConfigError("no model given; use --model with a directory or a name from --list")
    path = Path(model)
    if not path.exists() and model.startswith(("/", ".", "~")):
        raise ConfigError(f"--model {model}: no such directory")
    return read_model(path, kv_dtype) if path.exists() else preset(model, kv_dtype)


def _puts(chunk: ChunkSizing, tp_size: int, rule: PutRule) -> tuple[str, str]:
    """Return which payloads are put, and why."""
    cost = ChunkCost(chunk.payloads, chunk.nbytes)
    if rule.is_fixed:
        decision = rule.decide(cost)
        return decision.puts, decision.reason
    gpu_s = rule.gpu_s_for_all(cost)
    return "auto", (
        f"all if a replica computes fewer than {tp_size * chunk.tokens / gpu_s:,.0f} prompt "
        f"tokens/s, with GPUs at ${rule.prices.gpu_hour:g}/h; reused if it computes more"
    )


def _print(out: Printer, found: Sizing, layout: ReplicaLayout, load: Load, rule: PutRule) -> None:
    chunk = found.chunk
    kept = max(load.ttl_s + load.used_s, load.grace_s)
    rows: list[tuple[str, str, str]] = [
        ("model", found.model, f"{found.source}, KV as {found.kv_dtype}"),
        ("per token", bytes_text(round(chunk.token_bytes)), "as stored"),
        (
            "per chunk",
            bytes_text(chunk.nbytes),
            f"{chunk.tokens} tokens in {counted(chunk.payloads, 'payload')}, the largest "
            f"{bytes_text(chunk.largest_payload_bytes)}",
        ),
        (
            "per prompt",
            counted(found.prompt_chunks, "chunk"),
            f"{found.loaded_chunks} loaded, {found.prompt_chunks - found.loaded_chunks} saved",
        ),
        ("chunks", count(found.chunks), f"{count(found.records)} of them with a record"),
        (
            "bucket",
            bytes_text(round(found.bulk_bytes)),
            f"kept {_days(kept)}, swept every {_days(load.sweep_every_s)}",
        ),
        (
            "Redis",
            bytes_text(round(found.index_bytes)),
            f"records; hot payloads {bytes_text(round(found.hot_bytes))}",
        ),
        ("PUT", f"{_rate(found.puts_per_s)}/s", "one per payload"),
        ("GET", f"{_rate(found.gets_per_s)}/s", f"{bytes_text(RANGE_BYTES)} per range"),
        ("Redis commands", f"{_rate(found.redis_commands_per_s)}/s", "lookups, touches, saves"),
        ("network, saving", _gigabits(found.save_bytes_per_s), "whole fleet, sustained"),
        ("network, loading", _gigabits(found.load_bytes_per_s), "whole fleet, sustained"),
        (
            "per month",
            f"${found.month:,.0f}",
            f"storage ${found.storage_month:,.0f}, requests ${found.requests_month:,.0f}, at "
            f"prices of {rule.prices.source}",
        ),
        ("save_to_bucket", *_puts(chunk, layout.tp_size, rule)),
    ]
    out.table(("", "", "~"), rows)
    if found.prompt_chunks == 0:
        out.line("prompts are shorter than one chunk, so nothing is stored", "yellow")


def _print_presets(out: Printer) -> None:
    if out.document({"models": {name: plain(known) for name, known in PRESETS.items()}}):
        return
    rows = []
    for name, known in PRESETS.items():
        token = sum(2 * one.heads * one.content for one in known.shape(name, "bfloat16").layers)
        rows.append(
            (name, bytes_text(token), known.layers, known.kv_heads, known.size, known.source)
        )
    columns = ("model", ">per token, bfloat16", ">layers", ">KV heads", ">size", "source")
    out.table(columns, rows)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= _LARGE else f"{value:,.1f}"


def _gigabits(bytes_per_s: float) -> str:
    return f"{bytes_per_s / _GIGABIT:,.2f} Gbit/s"


def _days(seconds: float) -> str:
    return f"{seconds / 86_400:g} d" if seconds >= 86_400 else f"{seconds / 3_600:g} h"
