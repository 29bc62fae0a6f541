"""Judges whether a bucket's lifecycle rules fit ``ttl_s``, for ``objkv doctor`` and for audits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from objkv.errors import StoreDenied, StoreError
from objkv.ops.doctor.probes import Check
from objkv.ops.formats import noun, span
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
    except StoreDenied as exc:
        if "AccessDenied" not in str(exc):  # the other commands report it
            return LifecycleVerdict("unknown", nothing, f"the rules were not read: {exc}")
        detail = f"the rules were not read: this user has no right {RIGHT}"
        fix = "use the role sweeper, whose printed policy has it, or add it (objkv access)"
        return LifecycleVerdict("unknown", nothing, detail, fix)
    except StoreError as exc:
        return LifecycleVerdict("unknown", nothing, f"the rules were not read: {exc}")
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


def _conflicts(rules: LifecycleRules, ttl_s: int, pinned_s: float) -> list[tuple[str, str]]:
    """Return each conflict with its fix."""
    found = []
    if rules.expire_days is not None:
        days, expire_s = _days(rules.expire_days), rules.expire_days * _DAY_S
        if expire_s <= ttl_s:
            found.append(
                (
                    f"a rule deletes payloads {days} after they were saved, but records live for "
                    f"ttl_s, {span(ttl_s)} after their last use: until then each costs a failed "
                    "load",
                    "let the rule delete later than ttl_s, or shorten ttl_s",
                )
            )
        elif expire_s < pinned_s:
            found.append(
                (
                    f"a rule deletes payloads {days} after they were saved, and a pin lasts longer",
                    "let the rule delete later than the longest pin ends",
                )
            )
    if rules.archive_days is not None:
        found.append(
            (
                f"a rule archives payloads after {_days(rules.archive_days)}, and an archived "
                "payload cannot be loaded",
                "remove the transition to an archive",
            )
        )
    return found


def _days(days: int) -> str:
    return f"{days} {noun(days, 'day')}"


def check_lifecycle(read: ReadRules, ttl_s: int) -> list[Check]:
    """Return one check, or none if the bulk store is not a bucket."""
    verdict = judge_rules(read, ttl_s)
    if verdict is None:
        return []
    status: Literal["warning", "skipped", "ok"] = "ok"
    if verdict.status in ("conflicts", "unknown"):
        status = "warning" if verdict.status == "conflicts" else "skipped"
    fix = verdict.fix if verdict.status == "conflicts" else ""
    return [Check("bulk", "lifecycle", status, verdict.detail, fix)]
