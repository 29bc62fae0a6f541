"""Explains the settings and probes both ends: what is wrong, and what to do about it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from objkv.codec.seal import Seal
from objkv.config import Resolved, Role
from objkv.errors import ObjkvError
from objkv.index.base import PruneIndex
from objkv.ops.engine import check_engine, library_versions
from objkv.ops.privacy import check_privacy
from objkv.ops.probes import BAD, Check, failure
from objkv.ops.role_probes import probe_index_as, probe_store_as
from objkv.ops.server import ServerFacts, judge_server
from objkv.ops.transport import check_login, check_transport
from objkv.stores.base import PruneStore
from objkv.telemetry import MemoryRecorder

Verdict = Literal["ok", "warnings", "failed", "denied", "unreachable"]
End = Literal["bulk", "index"]

_OF_ONE_MACHINE: Final = frozenset(("file", "sqlite", "memory"))

_UNCONDITIONAL = Check(
    "bulk",
    "conditional put",
    "warning",
    "the server ignores If-None-Match, so objkv asks first and two writers at once may both write",
    "nothing is lost, bytes are sent twice; upgrade the server if that matters",
)

_OWN_INDEX = Check("index", "check", "ok", "none of its own: what lies in bulk_url is found there")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as it was resolved; secrets masked."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Everything ``objkv doctor`` found."""

    verdict: Verdict
    """The worst of all checks: unreachable, denied, failed, warnings, ok."""
    objkv: str
    python: str
    settings: tuple[Setting, ...]
    checks: tuple[Check, ...]
    libraries: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Patient:
    """Both ends, opened when asked for. Each function raises ``ObjkvError``; opening an end
    hands it over: doctor closes it."""

    open_bulk: Callable[[], PruneStore]
    open_hot: Callable[[], PruneStore | None]
    """None where no payloads are kept hot."""
    open_index: Callable[[], PruneIndex]
    describe_index: Callable[[], ServerFacts | None]
    """None where the index is no server."""
    numbers: MemoryRecorder
    """Where the bulk store counts."""
    open_seal: Callable[[], Seal | None] = lambda: None
    """What payloads are sealed with."""


def examine(resolved: Resolved, patient: Patient) -> DoctorReport:
    """Probe both ends as ``role`` uses them, with a key and a record of their own, which are
    removed again."""
    role = resolved.config.role
    own = resolved.config.index_url == "bulk:"
    # Its entries are payloads: there is no record to try it with.
    index = [_OWN_INDEX] if own else _examine_index(patient, role)
    # On one connection: what is wrong with it needs telling once.
    hot = [] if index[0].status in BAD else _examine_hot(patient, role)
    checks = [
        *_examine_bulk(patient, role),
        *_examine_reach(resolved, "bulk", "index"),
        *index,
        *_examine_reach(resolved, "index", "bulk"),
        *hot,
        *check_privacy(resolved.config),
        *_examine_seal(patient),
        *check_transport(resolved.config),
        *check_login(resolved.config),
        check_engine(),
    ]
    values = resolved.config.public()
    return DoctorReport(
        verdict=verdict(checks),
        objkv=metadata.version("objkv"),
        python=sys.version.split()[0],
        settings=tuple(
            Setting(name, value, resolved.sources[name]) for name, value in values.items()
        ),
        checks=tuple(checks),
        libraries=library_versions(),
    )


def verdict(checks: list[Check]) -> Verdict:
    """The worst of all checks."""
    found = {check.status for check in checks}
    for status in ("unreachable", "denied", "failed"):
        if status in found:
            return status
    return "warnings" if "warning" in found else "ok"


def _examine_seal(patient: Patient) -> list[Check]:
    try:
        seal = patient.open_seal()
    except ObjkvError as exc:
        return [failure("seal", "keys", exc)]
    return [] if seal is None else [Check("seal", "keys", "ok", seal.told)]


def _examine_reach(resolved: Resolved, area: End, other: End) -> list[Check]:
    """A warning if ``area`` is this machine's alone only because its URL was forgotten."""
    url = getattr(resolved.config, f"{other}_url")
    forgotten = resolved.sources[f"{area}_url"] == "default"
    if not forgotten or urlsplit(url).scheme in _OF_ONE_MACHINE:
        return []
    detail = f"{area}_url is not set: it is on this machine, while {other}_url leads elsewhere"
    fix = (
        f"set {area}_url on every replica: machines that have only one end in common share nothing"
    )
    return [Check(area, "reach", "warning", detail, fix)]


def _examine_bulk(patient: Patient, role: Role) -> list[Check]:
    try:
        store = patient.open_bulk()
    except ObjkvError as exc:
        return [failure("bulk", "open", exc)]
    try:
        checks = probe_store_as(role, "bulk", store)
    finally:
        store.close()
    if patient.numbers.value("s3_unconditional_puts"):
        return [*checks, _UNCONDITIONAL]
    return checks


def _examine_hot(patient: Patient, role: Role) -> list[Check]:
    try:
        store = patient.open_hot()
    except ObjkvError as exc:
        return [failure("hot", "open", exc)]
    if store is None:
        return []
    try:
        return probe_store_as(role, "hot", store)
    finally:
        store.close()


def _examine_index(patient: Patient, role: Role) -> list[Check]:
    try:
        index = patient.open_index()
    except ObjkvError as exc:
        return [failure("index", "open", exc)]
    try:
        checks = probe_index_as(role, index)
    finally:
        index.close()
    if checks[0].status in BAD:
        return checks
    try:
        facts = patient.describe_index()
    except ObjkvError as exc:
        return [*checks, failure("index", "server", exc)]
    return checks if facts is None else [*checks, *judge_server(facts)]
