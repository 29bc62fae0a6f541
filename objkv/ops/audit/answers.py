"""The parts of an audit beyond figures and faults, as plain values: savings, pins, and
whether the bucket deletes payloads too early.

The rules of ``report`` hold here too: ``None`` means unknown, never zero.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SavingsMonth:
    """The savings by loads in one namespace and month."""

    namespace: str
    month: str
    """UTC, ``2026-11``."""
    loads: int
    tokens: int
    """Tokens loaded instead of computed."""
    gpu_s: float | None
    """GPU seconds saved; None if no load was timed."""


@dataclass(frozen=True, slots=True)
class SavingsAudit:
    """The savings by loads, as the replicas that loaded measured them. They outlive the chunks.

    Measured are the loads, their duration, and how long the same replica computed a token of a
    prompt at that time. Assumed is that it would have computed every loaded token at this pace.
    """

    first_month: str | None
    """Since when replicas have reported; None, like all sums, if none has."""
    loads: int | None
    tokens: int | None
    timed_tokens: int | None
    """Loaded tokens of replicas that had measured how fast they compute; the following numbers
    cover only these."""
    compute_gpu_s: float | None
    """Computing time of these tokens, times the GPUs of the replica."""
    load_gpu_s: float | None
    """Duration of their loads, times the GPUs of the replica, as if all GPUs had waited."""
    gpu_s: float | None
    """GPU seconds saved: the difference. Below 0, loading cost more than it saved."""
    usd: float | None
    """Price of ``gpu_s``; None without a price per GPU hour."""
    months: tuple[SavingsMonth, ...]
    """By namespace, then by month."""


@dataclass(frozen=True, slots=True)
class PinAudit:
    """A pinned prefix."""

    namespace: str
    leaf: str
    """Hash of its last chunk, hex."""
    tokens: int
    chunks: int
    by: str | None
    """Who pinned it, by their own statement; None if pinned by an older version."""
    created_s: int
    until_s: int


LifecycleStatus = Literal["fits", "conflicts", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class LifecycleAudit:
    """Whether the bucket's lifecycle rules fit the settings."""

    status: LifecycleStatus
    """``none``: no rule deletes payloads. ``unknown``: the rules could not be read."""
    expire_days: int | None
    """Age at which a rule deletes payloads."""
    detail: str
    """The findings in sentences, with what to do."""
