"""The checks of an index that follow from the facts about its server."""

from objkv.index.base import ServerFacts
from objkv.ops.doctor.probes import Check

CLOCK_SKEW_MAX_S = 5.0
_VERSION_MIN = (6, 2)
_USED_MAX = 0.9


def judge_server(facts: ServerFacts) -> list[Check]:
    """Return one check per relevant fact. None of them is fatal: the index only loses hits."""
    return [_version(facts), _memory(facts), *_clock(facts), *_acl(facts)]


def _version(facts: ServerFacts) -> Check:
    if facts.version is None:
        return Check("index", "server", "ok", "the server does not report its version")
    detail = f"{facts.product} {facts.version}, {facts.mode}"
    numbers = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdecimal())
    if numbers < _VERSION_MIN:
        fix = "upgrade: objkv needs Redis 6.2 or Valkey"
        return Check("index", "server", "warning", detail, fix)
    return Check("index", "server", "ok", detail)


def _memory(facts: ServerFacts) -> Check:
    policy, limit, used = facts.maxmemory_policy, facts.maxmemory_bytes, facts.used_bytes
    if policy is None or limit is None:
        detail = "the server does not report its memory policy"
        return Check("index", "memory policy", "ok", detail)
    facts_text = f"maxmemory-policy {policy}, maxmemory {_mib(limit)}, used {_mib(used or 0)}"
    if limit == 0:
        fix = "set maxmemory below the machine's memory, with maxmemory-policy volatile-lru"
        detail = f"{facts_text}: with no limit Redis grows until it is killed for lack of memory"
        return Check("index", "memory policy", "warning", detail, fix)
    if policy == "noeviction":
        full = used is not None and used > _USED_MAX * limit
        fix = "set maxmemory-policy volatile-lru: every record expires and can be evicted safely"
        if full:
            detail = f"{facts_text}: nearly full; once full, new saves are not published"
            return Check("index", "memory policy", "warning", detail, fix)
        detail = f"{facts_text}: once full, new saves are not published"
        return Check("index", "memory policy", "ok", detail)
    if policy.startswith("allkeys-"):
        detail = (
            f"{facts_text}: Redis may also evict pinned records, which costs hits, and the totals "
            "used for quotas"
        )
        return Check("index", "memory policy", "ok", detail)
    last = "pinned ones last" if policy == "volatile-ttl" else "also pinned ones; this costs hits"
    detail = f"{facts_text}: Redis evicts old records, {last}"
    return Check("index", "memory policy", "ok", detail)


def _clock(facts: ServerFacts) -> list[Check]:
    if facts.clock_skew_s is None:
        return []
    detail = f"{round(facts.clock_skew_s, 1) + 0.0:+.1f} s from this machine's"
    if abs(facts.clock_skew_s) > CLOCK_SKEW_MAX_S:
        fix = "synchronize both clocks with NTP: ages and sweeps depend on them"
        return [Check("index", "clock", "warning", detail, fix)]
    return [Check("index", "clock", "ok", detail)]


def _acl(facts: ServerFacts) -> list[Check]:
    if not facts.denied:
        return []
    detail = f"not allowed: {', '.join(facts.denied)}; only this report needs them"
    return [Check("index", "ACL", "ok", detail)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes else "0"
