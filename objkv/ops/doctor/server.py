"""What a Redis-like server says of itself, and what that means for an index."""

from dataclasses import dataclass

from objkv.ops.doctor.probes import Check

CLOCK_SKEW_MAX_S = 5.0
_VERSION_MIN = (6, 2)
_USED_MAX = 0.9


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Plain values; None where the server did not tell (managed servers often refuse CONFIG)."""

    product: str
    """``redis`` or ``valkey``."""
    version: str | None
    mode: str | None
    """``standalone``, ``cluster`` or ``sentinel``."""
    maxmemory_bytes: int | None
    maxmemory_policy: str | None
    used_bytes: int | None
    clock_skew_s: float | None
    """Server's clock minus ours, less what may be the time that its answer took."""
    denied: tuple[str, ...] = ()
    """Commands that the ACL refused."""


def judge_server(facts: ServerFacts) -> list[Check]:
    """One check per fact that matters; nothing here is fatal, the index only loses hits."""
    return [_version(facts), _memory(facts), *_clock(facts), *_acl(facts)]


def _version(facts: ServerFacts) -> Check:
    if facts.version is None:
        return Check("index", "server", "ok", "the server does not tell its version")
    told = f"{facts.product} {facts.version}, {facts.mode}"
    numbers = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdecimal())
    if numbers < _VERSION_MIN:
        return Check("index", "server", "warning", told, "upgrade: objkv needs Redis 6.2 or Valkey")
    return Check("index", "server", "ok", told)


def _memory(facts: ServerFacts) -> Check:
    policy, limit, used = facts.maxmemory_policy, facts.maxmemory_bytes, facts.used_bytes
    if policy is None or limit is None:
        detail = "the server does not tell its memory policy"
        return Check("index", "memory policy", "ok", detail)
    told = f"maxmemory-policy {policy}, maxmemory {_mib(limit)}, used {_mib(used or 0)}"
    if limit == 0:
        fix = "set maxmemory below the machine's memory, with maxmemory-policy volatile-lru"
        detail = f"{told}: without a limit the server grows until the system ends it"
        return Check("index", "memory policy", "warning", detail, fix)
    if policy == "noeviction":
        full = used is not None and used > _USED_MAX * limit
        fix = "set maxmemory-policy volatile-lru: every record has a time to live and may go"
        if full:
            detail = f"{told}: nearly full, and then saves are no longer announced"
            return Check("index", "memory policy", "warning", detail, fix)
        return Check("index", "memory policy", "ok", f"{told}: once full, nothing new is announced")
    if policy.startswith("allkeys-"):
        detail = (
            f"{told}: pinned records may be evicted too, which costs hits only, and the totals "
            "that quotas go by"
        )
        return Check("index", "memory policy", "ok", detail)
    last = "last" if policy == "volatile-ttl" else "too, which costs hits only"
    detail = f"{told}: old records give way, pinned ones {last}"
    return Check("index", "memory policy", "ok", detail)


def _clock(facts: ServerFacts) -> list[Check]:
    if facts.clock_skew_s is None:
        return []
    told = f"{round(facts.clock_skew_s, 1) + 0.0:+.1f} s from this machine's"
    if abs(facts.clock_skew_s) > CLOCK_SKEW_MAX_S:
        fix = "set both clocks by NTP: ages and sweeps go by them"
        return [Check("index", "clock", "warning", told, fix)]
    return [Check("index", "clock", "ok", told)]


def _acl(facts: ServerFacts) -> list[Check]:
    if not facts.denied:
        return []
    told = f"not allowed: {', '.join(facts.denied)}"
    return [Check("index", "ACL", "ok", f"{told}: only this report needs them")]


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes else "0"
