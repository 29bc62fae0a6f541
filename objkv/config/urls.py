"""URLs and paths in settings: checks, defaults, and masking of passwords."""

import ipaddress
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from objkv.errors import ConfigError
from objkv.redact import without_secrets

_DEFAULT_QUOTA_BYTES = 50 << 30
BULK_SCHEMES = ("file", "memory", "s3")
DISK_SCHEMES = ("file",)
_REDIS_KINDS = ("redis", "redis+cluster", "redis+sentinel")
_TLS_KINDS = tuple(kind.replace("redis", "rediss") for kind in _REDIS_KINDS)
INDEX_SCHEMES = ("sqlite", "bulk", "memory", *_REDIS_KINDS, *_TLS_KINDS)

_DIRECTORY_BUCKET = ("--x-s3", "--xa-s3")
_HOST_PORT = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]+)(:\d{1,5})?")
_PARAMETER = re.compile(r"[?&][^=&]*(?:password|secret|token)[^=&]*=([^&]*)")
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/@]+)):(?P<port>[0-9]{1,5})"
)
_PORT_MAX = 65_535


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/objkv`` or ``~/.cache/objkv``, which the user's replicas share.

    Raises ``ConfigError`` for a user without a home, such as an id that a container was given.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "objkv"
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home folder: set HOME or XDG_CACHE_HOME to a folder in "
            "which it may write"
        ) from None


def make_private(folder: Path) -> None:
    """Create ``folder`` and its missing parents with mode 0700. Existing folders keep their mode.

    ``Path.mkdir(parents=True)`` applies its mode to the last folder only, so the parents would be
    readable by all users. Raises ``OSError``.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def default_quota_bytes() -> int:
    """Return the quota of the default folder: 50 GiB, or a fifth of its disk if that is less."""
    place = cache_folder()
    while True:
        try:
            return min(_DEFAULT_QUOTA_BYTES, shutil.disk_usage(place).total // 5)
        except OSError:
            if place == place.parent:
                return _DEFAULT_QUOTA_BYTES
        place = place.parent


def local_path(url: str) -> Path:
    """Return the path of a ``file://`` or ``sqlite://`` URL, without interpreting URL escapes.

    >>> str(local_path("file:///mnt/kv%20cache"))
    '/mnt/kv%20cache'
    >>> str(local_path("sqlite:////tmp/index.sqlite"))
    '/tmp/index.sqlite'
    """
    path = url.partition("://")[2].removeprefix("localhost")
    # ``Path`` would keep two leading slashes.
    return Path(f"/{path.lstrip('/')}" if path.startswith("/") else path)


def is_directory_bucket(bucket: str) -> bool:
    """Whether this is the name of an S3 Express directory bucket or of an access point to one.

    Signing, listing and permissions differ for such buckets.
    """
    return bucket.endswith(_DIRECTORY_BUCKET)


def without_password(url: str) -> str:
    """Return the URL with its passwords, if any, replaced by ``***``.

    >>> without_password("rediss://fleet:open@redis.example:6379/0")
    'rediss://fleet:***@redis.example:6379/0'
    """
    scheme, separator, rest = _parts(url)
    rest = _PARAMETER.sub(lambda match: match[0].removesuffix(match[1]) + "***", rest)
    # Split at the last "@": a password without percent-encoding may contain "@" and "/".
    login, at, place = rest.rpartition("@")
    if not at or scheme in ("file", "sqlite"):
        return f"{scheme}{separator}{rest}"
    user, colon, _ = login.partition(":")
    return f"{scheme}{separator}{user}{colon and ':***'}@{place}"


def _parts(url: str) -> tuple[str, str, str]:
    scheme, separator, rest = url.partition("://")
    return (scheme, separator, rest) if separator else ("", "", url)


def passwords_in(url: str) -> list[str]:
    """Return the passwords that ``without_password`` masks."""
    scheme, _, rest = _parts(url)
    found = [match[1] for match in _PARAMETER.finditer(rest)]
    login, at, _ = rest.rpartition("@")
    if at and scheme not in ("file", "sqlite"):
        found.append(login.partition(":")[2])
    return [password for password in found if password]


def check_url(name: str, url: str, known: tuple[str, ...]) -> None:
    """Raise ``ValueError``, which shows the valid form, unless ``url`` is valid for ``name``."""
    shown = without_secrets(without_password(url))  # a secret may be in the wrong setting
    scheme, _, rest = url.partition(":")
    if url.startswith("/"):
        kind = "sqlite" if "sqlite" in known else "file"
        raise ValueError(f"{name} {shown!r} is a path: write {kind}://{shown}")
    if scheme not in known:
        choices = f"use one of {', '.join(known)}"
        hint = _s3_form(shown) if "s3" in known else ""
        raise ValueError(f"{name} {shown!r}: {hint or choices}")
    if scheme == "bulk" and rest:
        raise ValueError(f"{name} {shown!r}: write bulk: only, the path comes from bulk_url")
    if scheme in ("file", "sqlite"):
        if not rest.startswith("//") or not local_path(url).is_absolute():
            raise ValueError(f"{name} {shown!r}: write {scheme}:/// and an absolute path")
    elif scheme not in ("memory", "bulk") and not _names_host(rest):
        what = "bucket" if scheme == "s3" else "host"
        raise ValueError(f"{name} {shown!r} names no {what}: write {scheme}://{what}")
    # A wrong host is not shown: it may be part of a password that was not escaped.
    elif "redis" in scheme and not all(map(_HOST_PORT.fullmatch, _places(url))):
        raise ValueError(f"{name} {shown!r}: write each host as host:port, the port in digits")


def _s3_form(url: str) -> str:
    """Return how to write ``url``, which has no password, as a bucket; empty if it is none."""
    scheme, _, rest = _parts(url)
    if scheme in ("s3a", "s3n"):
        return f"write s3://{rest}"
    if scheme not in ("http", "https"):
        return ""
    host, _, path = rest.rpartition("@")[2].partition("/")
    endpoint = f"{scheme}://{host}"
    return f"write s3://{path.strip('/') or 'bucket'} and set s3_endpoint_url to {endpoint}"


def _places(url: str) -> list[str]:
    """Return the hosts, with their ports, of a URL that may have several."""
    return urlsplit(url).netloc.rpartition("@")[2].split(",")


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a name or an address of the loopback interface.

    Names are not resolved, because a DNS server could then allow traffic without TLS.
    """
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def clear_hosts(url: str) -> list[str]:
    """Return the hosts in ``url`` to which traffic would cross a network without TLS.

    >>> clear_hosts("redis://10.0.0.7:6379"), clear_hosts("redis://127.0.0.1:6379")
    (['10.0.0.7'], [])
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    if parts.scheme not in ("http", *_REDIS_KINDS):
        return []
    hosts = [re.sub(r":\d*$", "", place) for place in _places(url)]
    return [host for host in hosts if not is_this_machine(host)]


def refuse_clear(name: str, url: str) -> None:
    """Raise ``ValueError``, which names the fix, if ``url`` uses another machine without TLS."""
    if clear_hosts(url):
        scheme = url.partition("://")[0]
        secure = "https" if scheme.lower() == "http" else scheme.replace("redis", "rediss", 1)
        raise ValueError(
            f"{name} {without_password(url)!r}: credentials and payloads would cross the network "
            f"unencrypted; write {secure}://, or set allow_plaintext to true on a trusted network"
        )


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 host is in brackets. Raises ``ValueError``.

    >>> parse_address("127.0.0.1:9410"), parse_address("[::1]:9410")
    (('127.0.0.1', 9410), ('::1', 9410))
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > _PORT_MAX:
        raise ValueError("write HOST:PORT, an IPv6 address in brackets: [::1]:9410")
    return found["v6"] or found["host"], int(found["port"])


def _names_host(rest: str) -> bool:
    try:
        return bool(urlsplit(rest).netloc.rpartition("@")[2])
    except ValueError:  # brackets without an IPv6 address
        return False
