"""Checks of a replica's node agent: whether it answers, and whether its arena fits this machine."""

import os
import shutil
import stat
from contextlib import closing, suppress
from pathlib import Path

from objkv.agent.client import AgentConnection
from objkv.agent.disk import FOLDER
from objkv.agent.memory.arena import PAGE, Arena
from objkv.cache.worth import PutRule
from objkv.config import Config
from objkv.config.node import agent_socket, host_bytes
from objkv.config.urls import local_path
from objkv.errors import ConfigError, TransferError
from objkv.ops.doctor.probes import Check

_ARENA_SHARE_MAX = 3 / 4
"""More of the machine's memory leaves too little for engines and page cache."""


def check_agent(config: Config) -> list[Check]:
    """Return the checks for the setting ``agent``."""
    try:
        path = agent_socket(config)
    except ConfigError as exc:
        detail = f"{exc}; replicas cache nothing"
        fix = "chmod 700 the folder if it is yours, or remove it"
        return [Check("agent", "socket", "warning", detail, fix)]
    checks = [_check_memory(), *_check_disk(config)]
    if path is None:
        checks.append(_check_saves(config))
        return [Check("agent", "socket", "ok", "each replica starts its own"), *checks]
    checks = [*_check_folder(path), *checks, _check_saves(config)]
    try:
        with closing(AgentConnection(path, wants_arena=True)) as agent:
            nbytes = agent.arena.nbytes
    except TransferError as exc:
        if config.agent == "auto" and not path.exists():
            detail = "none runs; the first replica starts one"
            return [Check("agent", "socket", "ok", detail), *checks]
        fix = f"start it: objkv agent --socket {path}, as the user of the replicas"
        return [Check("agent", "socket", "unreachable", str(exc), fix), *checks]
    answers = Check("agent", "socket", "ok", f"{path}, arena of {nbytes >> 20:,} MiB")
    return [answers, _check_size(nbytes), *checks]


def _check_folder(path: Path) -> list[Check]:
    """Check that other users cannot put a socket of their own in place of the agent's."""
    try:
        mode = path.parent.stat().st_mode
    except OSError:  # the check of the socket reports it
        return []
    if not mode & (stat.S_IWGRP | stat.S_IWOTH) or mode & stat.S_ISVTX:
        return [Check("agent", "socket folder", "ok", str(path.parent))]
    detail = f"{path.parent} can be written by other users"
    return [Check("agent", "socket folder", "warning", detail, f"chmod go-w {path.parent}")]


def _check_size(nbytes: int) -> Check:
    limit = host_bytes()
    detail = f"{nbytes >> 20:,} MiB of {limit >> 20:,} MiB"
    if nbytes <= _ARENA_SHARE_MAX * limit:
        return Check("agent", "arena size", "ok", detail)
    return Check("agent", "arena size", "warning", detail, "lower agent_memory_bytes")


def _check_memory() -> Check:
    """Check that this system can share memory as an agent does."""
    try:
        Arena.create(PAGE).close()
    except ConfigError as exc:
        return Check("agent", "shared memory", "failed", str(exc), "needs Linux 5.1 or later")
    return Check("agent", "shared memory", "ok", "sealed memory files")


def _check_saves(config: Config) -> Check:
    """Say which payloads an agent puts, and why."""
    rule = PutRule.of(config)
    prices = rule.prices
    detail = f"save_to_bucket {rule.setting}"
    if rule.is_fixed:
        return Check("agent", "saves", "ok", f"{detail}, {rule.decide(rule.chunk(()))}")
    detail += (
        f", at prices of {prices.source}: ${prices.per_1000_puts:g} for 1,000 PUTs, "
        f"${prices.gb_month:g} for a GB and month; ${prices.gpu_hour:g} for a GPU and hour"
    )
    if prices.is_guessed:
        fix = "set price_gb_month and price_puts to those of your provider"
        return Check("agent", "saves", "warning", detail, fix)
    return Check("agent", "saves", "ok", detail)


def _check_disk(config: Config) -> list[Check]:
    """Check the folder of ``agent_disk_url``. Creates nothing: an agent does."""
    if config.agent_disk_url is None:
        return []
    folder = nearest = local_path(config.agent_disk_url)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        detail = f"{nearest} is not a folder that this user may write"
        return [Check("agent", "disk", "failed", detail, "change its owner, or agent_disk_url")]
    free = shutil.disk_usage(nearest).free
    used = 0
    for file in (folder / FOLDER).glob("*.*"):
        with suppress(OSError):  # evicted meanwhile
            used += file.stat().st_size
    detail = f"{folder}, {used >> 20:,} MiB of payloads, {free >> 20:,} MiB free"
    if config.agent_disk_bytes <= free + used:
        return [Check("agent", "disk", "ok", detail)]
    return [Check("agent", "disk", "warning", detail, "lower agent_disk_bytes")]
