"""Checks of a replica's node agent and, by what it says, of its stores."""

import os
import shutil
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from objkv import errors
from objkv.agent.client import is_listening
from objkv.agent.disk import FOLDER
from objkv.agent.http.status import AgentStatus, StoreStatus
from objkv.agent.memory.arena import PAGE, Arena
from objkv.agent.messages import VERSION
from objkv.cache.worth import ChunkCost, PutRule
from objkv.config import Config
from objkv.config.node import agent_socket, host_bytes, http_path
from objkv.config.urls import local_path
from objkv.errors import ConfigError, ObjkvError, StoreError, StoreUnavailable
from objkv.ops.doctor.probes import Area, Check, Status, failure
from objkv.ops.formats import age, size

_ARENA_SHARE_MAX = 3 / 4
"""More of the machine's memory leaves too little for engines and page cache."""
_REPLACE = "replace it: objkv agent --replace --socket {}"


def check_agent(config: Config) -> tuple[list[Check], bool]:
    """Return the checks for the setting ``agent``, and whether they include those of its stores:
    then a replica uses no store itself."""
    try:
        path = agent_socket(config)
    except ConfigError as exc:
        detail = f"{exc}; replicas cache nothing"
        fix = "chmod 700 the folder if it is yours, or remove it"
        return [Check("agent", "socket", "warning", detail, fix)], False
    starts = config.agent in ("auto", "private")
    if path is not None and (is_listening(path) or not starts):
        from objkv.ops.agent_api import AgentApi  # imports numpy, which help does not need

        try:
            status = AgentApi(http_path(path)).status()
        except StoreUnavailable as exc:
            return [*_check_down(path, exc, starts=starts), *_check_folder(path)], not starts
        except (StoreError, ConfigError) as exc:
            fix = _REPLACE.format(path)
            unclear = Check("agent", "status", "failed", f"{path}: {exc}", fix)
            return [unclear, *_check_folder(path)], not starts
        return [*_check_running(config, path, status), *_check_folder(path)], True
    detail = "each replica starts its own" if path is None else "the first replica starts one"
    checks = [Check("agent", "socket", "ok", detail), _check_memory(), *_check_disk(config)]
    return [*checks, _check_saves(config, {})], False


def _check_down(path: Path, exc: ObjkvError, *, starts: bool) -> list[Check]:
    fix = f"start it as the user of the replicas: objkv agent --socket {path}"
    if is_listening(path):  # it hangs
        fix = _REPLACE.format(path)
    said = str(exc).partition(": start one")[0].replace(".http", "")
    detail = f"{said}; without it, replicas cache nothing"
    checks = [Check("agent", "socket", "unreachable", detail, fix)]
    if not starts:
        what = "only the agent uses them, and it does not answer"
        checks.append(Check("agent", "its stores", "not checked", what))
    return checks


def _check_running(config: Config, path: Path, status: AgentStatus) -> list[Check]:
    used = status.memory_bytes - status.free_bytes
    detail = f"{path}, objkv {status.version}, {size(used)} of {size(status.memory_bytes)} in use"
    why, fix = "", _REPLACE.format(path)
    if status.protocol != VERSION:
        why = f": it speaks version {status.protocol} of the protocol, and replicas {VERSION}"
    elif not status.is_accepting:
        why = ": it serves no new replicas"
    elif tuple(status.seals) != config.seal_kinds:
        ours, theirs = ",".join(config.seal_kinds) or "none", ",".join(status.seals) or "none"
        why = f": its payloads have seals={theirs}, and replicas {ours}, so it refuses them"
        fix = "set the same keys for the agent, or its seals for the replicas"
    socket: Status = "failed" if why else "ok"
    checks = [Check("agent", "socket", socket, f"{detail}{why}", fix * bool(why))]
    if status.memory_bytes > _ARENA_SHARE_MAX * host_bytes():
        detail = f"{size(status.memory_bytes)} of the machine's {size(host_bytes())}"
        checks.append(Check("agent", "memory", "warning", detail, "lower agent_memory_bytes"))
    if status.role == "reader" != config.role:
        detail = "its role is reader, so the replicas save nothing"
        checks.append(Check("agent", "role", "warning", detail, "set role to writer for it"))
    for store in status.stores:
        checks += [_check_store(store), *_check_puts(status, store)]
        checks += [
            Check(
                "agent",
                f"{store.area} {way}s",
                "failed",
                "stopped, because they kept failing; the agent tries again within seconds",
                "see its last warnings: objkv doctor --all",
            )
            for way in store.breakers_open
            if store.error is None
        ]
    held = f"{status.held_back_payloads:,} payloads, {size(status.held_back_bytes)}"
    checks.append(Check("agent", "held back", "ok", f"{held}, that no store has so far"))
    if status.warnings:
        shown = [f"{age(one.at_s, status.at_s)} ago: {one.text}" for one in status.warnings]
        checks.append(Check("agent", "last warnings", "ok", "; ".join(shown)))
    return [*checks, _check_saves(config, status.saves)]


def _check_store(store: StoreStatus) -> Check:
    area = cast("Area", store.area if store.area in ("bulk", "hot", "index") else "agent")
    if store.error is None:
        return Check(area, "by the agent", "ok", store.url)
    kind = getattr(errors, store.kind or "", StoreError)
    found = failure(area, "by the agent", kind(f"{store.url}: {store.error}"))
    return replace(found, fix=f"{found.fix}, in the agent's settings" if found.fix else "")


def _check_puts(status: AgentStatus, store: StoreStatus) -> list[Check]:
    """Whether the agent has put something. Nothing is put for a check: no writer may delete it."""
    if store.area != "bulk" or store.error is not None or status.role != "writer":
        return []
    if worked := max(0, store.writes - store.write_errors):
        detail = f"{worked:,} by the agent since its start"
        if not store.write_errors:
            return [Check("bulk", "puts", "ok", detail)]
        fix = "see its last warnings: objkv doctor --all"
        return [Check("bulk", "puts", "warning", f"{detail}; {store.write_errors:,} failed", fix)]
    detail = "the agent has put nothing since its start"
    if store.writes:
        detail = f"none of {store.writes:,} puts by the agent since its start worked"
    fix = "send a replica a prompt that is longer than chunk_tokens, and run this again"
    status_text: Status = "failed" if store.writes else "not checked"
    return [Check("bulk", "puts", status_text, detail, fix)]


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


def _check_memory() -> Check:
    """Check that this system can share memory as an agent does."""
    try:
        Arena.create(PAGE).close()
    except ConfigError as exc:
        return Check("agent", "shared memory", "failed", str(exc), "needs Linux 5.1 or later")
    return Check("agent", "shared memory", "ok", "sealed memory files")


def _check_saves(config: Config, decided: dict[str, str]) -> Check:
    """Say which payloads an agent puts, and why. ``decided``: by a running one."""
    rule = PutRule.of(config)
    prices, detail = rule.prices, f"save_to_bucket {rule.setting}"
    if decided:
        shown = [f"{name[:8]} {one}".strip() for name, one in decided.items()]
        return Check("agent", "saves", "ok", "; ".join([detail, *shown]))
    if rule.is_fixed:
        return Check("agent", "saves", "ok", f"{detail}, {rule.decide(ChunkCost(0, 0))}")
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
    detail = f"{folder}, {size(used)} of payloads, {size(free)} free"
    if config.agent_disk_bytes <= free + used:
        return [Check("agent", "disk", "ok", detail)]
    return [Check("agent", "disk", "warning", detail, "lower agent_disk_bytes")]
