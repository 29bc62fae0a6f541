"""The checks that follow from what the servers say: a bucket's lifecycle rules, and the memory and
the clock of Redis. None of them is fatal. Audits judge the rules, too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from objkv.errors import StoreDenied, StoreError
from objkv.index.base import ServerFacts
from objkv.ops.doctor.probes import Check, Status
from objkv.ops.formats import noun, size, span
from objkv.stores.base import LifecycleRules

ReadRules = Callable[[], LifecycleRules | None]
"""Returns None if the bulk store is not a bucket. Raises ``StoreError``."""
RIGHT: Final = "s3:GetLifecycleConfiguration"
_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class LifecycleVerdict:
    """The judgement of a bucket's rules."""

    status: Literal["fits", "conflicts", "none", "unknown"]
    rules: LifecycleRules
    detail: str
    fix: str = ""


def judge_rules(read: ReadRules, ttl_s: int, *, pinned_s: float = 0.0) -> LifecycleVerdict | None:
    """Return the judgement; None if there is no bucket. ``pinned_s``: duration of the longest
    pin, because lifecycle rules ignore pins. Raises nothing."""
    nothing = LifecycleRules(None, None)
    try:
        rules = read()
    except StoreError as exc:
        why, fix = str(exc), ""
        if isinstance(exc, StoreDenied) and "AccessDenied" in why:
            why = f"this user has no right {RIGHT}"
            fix = "use the role sweeper, whose printed policy has it, or add it (objkv access)"
        return LifecycleVerdict("unknown", nothing, f"the rules were not read: {why}", fix)
    if rules is None:
        return None
    found = [*_conflicts(rules, ttl_s, pinned_s)]
    if found:
        detail = "; ".join(text for text, _ in found)
        return LifecycleVerdict("conflicts", rules, detail, "; ".join(fix for _, fix in found))
    if rules.expire_days is None:
        return LifecycleVerdict("none", rules, "no rule deletes payloads, only objkv sweep does")
    days = _days(rules.expire_days)
    detail = f"payloads are deleted after {days}, ttl_s is {span(ttl_s)}"
    return LifecycleVerdict("fits", rules, detail)


def _conflicts(rules: LifecycleRules, ttl_s: int, pinned_s: float) -> Iterator[tuple[str, str]]:
    """Yield each conflict with its fix."""
    if rules.expire_days is not None:
        days, expire_s = _days(rules.expire_days), rules.expire_days * _DAY_S
        what = f"a rule deletes payloads {days} after they were saved"
        if expire_s <= ttl_s:
            yield (
                f"{what}, but records live for ttl_s, {span(ttl_s)} after their last use: until "
                "then each costs a failed load",
                "let the rule delete later than ttl_s, or shorten ttl_s",
            )
        elif expire_s < pinned_s:
            fix = "let the rule delete later than the longest pin ends"
            yield f"{what}, and a pin lasts longer", fix
    if rules.archive_days is not None:
        days = _days(rules.archive_days)
        what = f"a rule archives payloads after {days}, and an archived payload cannot be loaded"
        yield what, "remove the transition to an archive"


def _days(days: int) -> str:
    return f"{days} {noun(days, 'day')}"


def check_lifecycle(read: ReadRules, ttl_s: int) -> list[Check]:
    """Return one check, or none if the bulk store is not a bucket."""
    verdict = judge_rules(read, ttl_s)
    if verdict is None:
        return []
    statuses: dict[str, Status] = {"conflicts": "warning", "unknown": "not checked"}
    return [
        Check("bulk", "lifecycle", statuses.get(verdict.status, "ok"), verdict.detail, verdict.fix)
    ]


CLOCK_SKEW_MAX_S = 5.0
_VERSION_MIN = (6, 2)
_USED_MAX = 0.9
_AS_SWEEPER: Final = "run objkv doctor as the role sweeper, whose ACL has INFO and TIME"


def check_server(facts: ServerFacts) -> list[Check]:
    """Return one check for each fact."""
    return [_version(facts), _memory(facts), _clock(facts)]


def _unknown(name: str, facts: ServerFacts, what: str) -> Check:
    if facts.denied:
        detail = f"this user may not run {' and '.join(facts.denied)}"
        return Check("index", name, "not checked", detail, _AS_SWEEPER)
    return Check("index", name, "not checked", f"the server does not report its {what}")


def _version(facts: ServerFacts) -> Check:
    if facts.version is None:
        return _unknown("server", facts, "version")
    detail = f"{facts.product} {facts.version}, {facts.mode}"
    numbers = tuple(int(part) for part in facts.version.split(".")[:2] if part.isdecimal())
    if numbers < _VERSION_MIN:
        fix = "upgrade: objkv needs Redis 6.2 or Valkey"
        return Check("index", "server", "warning", detail, fix)
    return Check("index", "server", "ok", detail)


def _memory(facts: ServerFacts) -> Check:
    policy, limit, used = facts.maxmemory_policy, facts.maxmemory_bytes, facts.used_bytes or 0
    if policy is None or limit is None:
        return _unknown("memory policy", facts, "memory policy")
    text = f"maxmemory-policy {policy}, maxmemory {size(limit)}, used {size(used)}"
    if limit == 0:
        fix = "set maxmemory below the machine's memory, with maxmemory-policy volatile-lru"
        detail = f"{text}: with no limit Redis grows until it is killed for lack of memory"
        return Check("index", "memory policy", "warning", detail, fix)
    if policy == "noeviction":
        fix = "set maxmemory-policy volatile-lru: every record expires and can be evicted safely"
        near: str = "once full"
        status: Status = "ok"
        if used > _USED_MAX * limit:
            near, status = "nearly full; once full", "warning"
        detail = f"{text}: {near}, new saves are not published"
        return Check("index", "memory policy", status, detail, fix if status != "ok" else "")
    evicted = "evicts old records, also pinned ones; this costs hits"
    if policy.startswith("allkeys-"):
        evicted = "may also evict pinned records, which costs hits, and the totals used for quotas"
    elif policy == "volatile-ttl":
        evicted = "evicts old records, pinned ones last"
    return Check("index", "memory policy", "ok", f"{text}: Redis {evicted}")


def _clock(facts: ServerFacts) -> Check:
    if facts.clock_skew_s is None:
        return _unknown("clock", facts, "time")
    detail = f"{round(facts.clock_skew_s, 1) + 0.0:+.1f} s from this machine's"
    if abs(facts.clock_skew_s) > CLOCK_SKEW_MAX_S:
        fix = "synchronize both clocks with NTP: ages and sweeps depend on them"
        return Check("index", "clock", "warning", detail, fix)
    return Check("index", "clock", "ok", detail)
