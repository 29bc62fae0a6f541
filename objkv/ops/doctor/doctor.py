"""Checks the settings and what they lead to: the node agent, or store and index. Each problem comes
with a fix, and what could not be checked is never called fine."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Final, Literal, TypeVar

from objkv.cache.quota import FULL_PERCENT
from objkv.cache.switch import read_switches
from objkv.codec.seal import Seal
from objkv.config import Resolved
from objkv.errors import ObjkvError, PayloadError
from objkv.index.base import ServerFacts, WriteIndex
from objkv.ops.backends_view import read_namespace, stored_namespaces
from objkv.ops.doctor.agent import check_agent
from objkv.ops.doctor.probes import BAD, Area, Bad, Check, failure, probe_index, probe_store
from objkv.ops.doctor.servers import ReadRules, check_lifecycle, check_server
from objkv.ops.doctor.settings import (
    check_engine,
    check_folder,
    check_login,
    check_privacy,
    check_reach,
    check_transport,
)
from objkv.ops.formats import noun
from objkv.ops.listing import NamespaceSummary, list_namespaces, list_tenants, payload_namespaces
from objkv.stores.base import HotStore, PruneStore, ReadStore

T = TypeVar("T", PruneStore, HotStore, WriteIndex)
Verdict = Literal["ok", "warnings", Bad]
_CLEAR_FIX: Final = "objkv admission clear (with --namespace for one namespace) ends it"
_SWEEP_FIX: Final = "objkv sweep --apply deletes what is older than sweep_grace_s"
_LOST_FIX: Final = (
    "objkv audit says whether all have expired; otherwise check index_url and redis_prefix, or run "
    "objkv rebuild --apply"
)
_NAMESPACES_MAX: Final = 100
"""How many identity documents are read."""


@dataclass(frozen=True, slots=True)
class SettingReport:
    """One resolved setting; secrets are masked."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The report of ``objkv doctor``."""

    verdict: Verdict
    """The worst of all checks: unreachable, denied, full, failed, warnings, ok."""
    summary: str
    """The verdict in a line, with the numbers of what failed or was not checked."""
    objkv: str
    python: str
    settings: tuple[SettingReport, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Openers:
    """Functions that open store and index, for doctor to close. Each raises ``ObjkvError``."""

    bulk: Callable[[], PruneStore]
    hot: Callable[[], HotStore | None]
    """Returns None if no hot store is configured."""
    index: Callable[[], WriteIndex]
    describe_index: Callable[[], ServerFacts | None]
    """Returns None if the index is not a server."""
    seal: Callable[[], Seal | None] = lambda: None
    read_rules: ReadRules = lambda: None


def examine(resolved: Resolved, openers: Openers) -> DoctorReport:
    """Check what a replica with these settings uses: the agent that runs, and by it its stores;
    without one the stores as ``role`` uses them, with a temporary payload and record."""
    agent, by_agent = check_agent(resolved.config)
    checks = [*agent]
    if not by_agent:
        checks += _examine_stores(resolved, openers)
    if not by_agent or resolved.config.agent == "auto":  # whose settings are the agent's, too
        checks += [*check_reach(resolved), *check_privacy(resolved.config), *_examine_seal(openers)]
        checks += [*check_transport(resolved.config), *check_login(resolved.config)]
    if by_agent:
        checks += _examine_beside(resolved, openers, _other_stores(resolved, agent))
    checks.append(check_engine())
    return DoctorReport(
        verdict=verdict(checks),
        summary=_summary(checks),
        objkv=metadata.version("objkv"),
        python=sys.version.split()[0],
        settings=tuple(
            SettingReport(name, value, resolved.sources[name])
            for name, value in resolved.config.public().items()
        ),
        checks=tuple(checks),
    )


def verdict(checks: list[Check]) -> Verdict:
    """The worst of all checks."""
    found = {check.status for check in checks}
    fine: Verdict = "warnings" if "warning" in found else "ok"
    return next((status for status in BAD if status in found), fine)


def _summary(checks: list[Check]) -> str:
    counts = Counter(check.status for check in checks)
    bad = sum(counts[status] for status in BAD)
    words = [f"does not work: {bad} {noun(bad, 'check')} failed" if bad else "works"]
    if count := counts["warning"]:
        words.append(f"{count} {noun(count, 'warning')}")
    if count := counts["not checked"]:
        words.append(f"{count} {noun(count, 'thing')} not checked")
    return "; ".join(words)


def _examine_stores(resolved: Resolved, openers: Openers) -> list[Check]:
    config = resolved.config
    role = config.role

    def bulk(store: PruneStore) -> list[Check]:
        checks = probe_store(role, "bulk", store, listed=store)
        if any(check.status in BAD for check in checks):
            return checks
        return [*checks, *_examine_contents(store, openers, config.ttl_s)]

    checks = [*check_folder(resolved), *_probed("bulk", openers.bulk, bulk)]
    if config.index_url == "bulk:":  # no records to probe
        return [*checks, Check("index", "check", "ok", "the bulk folder is its own index")]
    index = _probed("index", openers.index, lambda opened: probe_index(role, opened))
    is_bad = any(check.status in BAD for check in index)
    if index[0].status not in BAD:
        index += _examine_server(openers)
    if is_bad:  # the hot store is on the same server: one report is enough
        return [*checks, *index]
    if not any(check.status in BAD for check in checks):
        index += _examine_match(openers, config.quota_bytes)
    hot = _probed("hot", openers.hot, lambda store: probe_store(role, "hot", store))
    return [*checks, *index, *hot]


def _other_stores(resolved: Resolved, agent: Sequence[Check]) -> list[Check]:
    """A warning if the settings of this command name other stores than the agent uses."""
    own, checks = resolved.config.public(), list[Check]()
    for one in agent:
        name, used = f"{one.area}_url", one.detail.partition(": ")[0].rstrip("/")
        is_set = resolved.sources.get(name, "default") != "default"
        if one.name == "by the agent" and is_set and used != own[name].rstrip("/"):
            detail = f"{name} is {own[name]} here, and {used} for the agent"
            fix = f"set {name} as for the agent, or leave it unset"
            checks.append(Check("agent", "other stores", "warning", detail, fix))
    return checks


def _examine_beside(
    resolved: Resolved, openers: Openers, other_stores: Sequence[Check]
) -> list[Check]:
    """What an agent does not say of its stores: read with the settings of this command if they name
    the stores, otherwise named as not checked. A failure is the command's own, not the agent's."""
    config, checks = resolved.config, [*other_stores]
    left = ["reach", "privacy", "sealing keys", "transport", "login"]
    is_named = resolved.sources["bulk_url"] != "default" and not other_stores
    if config.agent == "auto" or is_named:
        found = _probed("bulk", openers.bulk, lambda b: _examine_contents(b, openers, config.ttl_s))
        found += _examine_server(openers)
        if config.index_url != "bulk:":
            found += _examine_match(openers, config.quota_bytes)
        checks += [replace(c, status="not checked") if c.status in BAD else c for c in found]
    else:
        left += ["admission orders", "earlier formats", "lifecycle rules", "server of the index"]
        left.append("whether index and bucket match")
    if config.agent == "auto":
        return checks
    detail = f"{', '.join(left)}: only the agent's settings say what they are"
    fix = "OBJKV_AGENT=private objkv doctor, with the agent's settings, checks them"
    return [*checks, Check("agent", "its settings", "not checked", detail, fix)]


def _examine_contents(bulk: ReadStore, openers: Openers, ttl_s: int) -> list[Check]:
    rules = check_lifecycle(openers.read_rules, ttl_s)
    return [*rules, *_examine_switches(bulk), *_examine_formats(bulk)]


def _examine_match(openers: Openers, quota_bytes: int) -> list[Check]:
    """A warning for a quota that stops saves, or if one side lacks all of the other."""
    try:
        with closing(openers.bulk()) as bulk, closing(openers.index()) as index:
            usage = [one for one in index.usage() if one.payloads > 0]
            recorded = {one.namespace for one in usage}
            if not recorded and (stored := payload_namespaces(bulk)):
                detail = f"the index has no records, and the bulk store {len(stored)} "
                detail += f"{noun(len(stored), 'namespace')} with payloads"
                return [Check("index", "match", "warning", detail, _LOST_FIX)]
            if not recorded or recorded.intersection(stored_namespaces(bulk)):
                if 100 * sum(one.nbytes for one in usage) < FULL_PERCENT * quota_bytes:
                    return []
                return list(_full_tenants(list_namespaces(bulk, index), quota_bytes))
    except ObjkvError as exc:
        return [Check("index", "match", "not checked", str(exc))]
    count = len(recorded)
    detail = f"the bulk store has none of the {count} {noun(count, 'namespace')} in the index"
    fix = (
        "check bulk_url, index_url and, with Redis, redis_prefix: they do not belong together, or "
        "the bucket was emptied (then objkv sweep --apply --force removes the records)"
    )
    return [Check("index", "match", "warning", detail, fix)]


def _full_tenants(found: Sequence[NamespaceSummary], quota_bytes: int) -> Iterator[Check]:
    for one in list_tenants(found):
        is_full = 100 * one.nbytes >= FULL_PERCENT * quota_bytes
        if quota_bytes and is_full and one.tenant is not None:
            used = 100 * one.nbytes // quota_bytes
            detail = (
                f"tenant {one.tenant} uses {used} % of its quota; saves stop at {FULL_PERCENT} %"
            )
            fix = "objkv sweep --apply evicts the least used prefixes that are not pinned"
            yield Check("index", "quota", "warning", detail, fix)


def _examine_server(openers: Openers) -> list[Check]:
    try:
        facts = openers.describe_index()
    except ObjkvError as exc:
        return [failure("index", "server", exc)]
    return [] if facts is None else check_server(facts)


def _examine_seal(openers: Openers) -> list[Check]:
    try:
        seal = openers.seal()
    except ObjkvError as exc:
        return [failure("seal", "keys", exc)]
    return [] if seal is None else [Check("seal", "keys", "ok", seal.key_ids)]


def _examine_switches(bulk: ReadStore) -> list[Check]:
    """A warning while an operator's switch decides about loads."""
    try:
        orders = [one for one in read_switches(bulk) if one.until_s > time.time()]
    except PayloadError as exc:
        return [Check("bulk", "admission", "warning", str(exc))]
    except ObjkvError as exc:
        return [failure("bulk", "admission", exc)]
    return [
        Check("bulk", "admission", "warning", f"{one.scope()}: {one.describe()}", _CLEAR_FIX)
        for one in orders
    ]


def _examine_formats(bulk: ReadStore) -> list[Check]:
    """A warning if payloads of some of the first namespaces have a format that is not read."""
    try:
        names = stored_namespaces(bulk)[:_NAMESPACES_MAX]
        old = sum(read_namespace(bulk, name).is_old_format for name in names)
    except ObjkvError as exc:
        return [failure("bulk", "format", exc)]
    detail = f"{old} {noun(old, 'namespace')} in an earlier format, which is not read any more"
    return [Check("bulk", "format", "warning", detail, _SWEEP_FIX)] if old else []


def _probed(
    area: Area, opened: Callable[[], T | None], probe: Callable[[T], list[Check]]
) -> list[Check]:
    """Open a backend and return its checks; none if ``opened`` returns None."""
    try:
        found = opened()
    except ObjkvError as exc:
        return [failure(area, "open", exc)]
    if found is None:
        return []
    with closing(found):
        return probe(found)
