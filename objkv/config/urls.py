"""The one reader of URLs in settings and options. It refuses every part of one that would not be
used. Its errors quote nothing of it: any part may belong to a password that was not escaped."""

import ipaddress
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from objkv.errors import ConfigError
from objkv.redact import keep_secret

_DEFAULT_QUOTA_BYTES = 50 << 30
_REDIS_FORMS: Final = {
    "redis": "redis://HOST:6379/0",
    "redis+cluster": "redis+cluster://HOST:6379,HOST:6379",
    "redis+sentinel": "redis+sentinel://HOST:26379,HOST:26379/0?service=NAME",
}
_HTTP_FORMS: Final = {"http": "http://HOST:PORT", "https": "https://HOST:PORT"}
FORMS: Final[Mapping[str, Mapping[str, str]]] = {
    "bulk_url": {"s3": "s3://BUCKET/PREFIX", "file": "file:///PATH"},
    "index_url": {
        "sqlite": "sqlite:///PATH",
        "bulk": "bulk:",
        **_REDIS_FORMS,
        **{
            name.replace("s", "ss", 1): form.replace("s", "ss", 1)
            for name, form in _REDIS_FORMS.items()
        },
    },
    "s3_endpoint_url": _HTTP_FORMS,
    "agent_disk_url": {"file": "file:///PATH"},
    "endpoint": _HTTP_FORMS,
    "proxy": {**_HTTP_FORMS, "socks5": "socks5://HOST:PORT", "socks5h": "socks5h://HOST:PORT"},
}
"""How each kind of URL is written, by scheme."""
_SERVER = re.compile(
    r"//(?:(?P<login>[^/?#]*)@)?(?P<place>[^/?#@]*)(?P<path>/[^?#]*)?"
    r"(?P<query>\?[^#]*)?(?P<fragment>#.*)?",
    re.DOTALL,
)
_HOST_PORT = re.compile(r"(\[[^\[\]]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ADDRESS_ONLY = re.compile(r"\[.*\]|[0-9]+(\.[0-9]+){3}")
_PORTS = range(1, 65_536)
_BUCKET = re.compile(
    r"(?![0-9]+(?:\.[0-9]+){3}$)[A-Za-z0-9._-]{1,255}|arn:[A-Za-z0-9-]+:s3[a-z-]*:[A-Za-z0-9:._-]+"
)
_DATABASE = re.compile(r"/?([0-9]{0,5})/?")
_SERVICE = re.compile(r"\?service=([A-Za-z0-9._-]+)")


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/objkv`` or ``~/.cache/objkv``. Raises ``ConfigError`` for a user
    without a home, such as an id that a container was given."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "objkv"
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home folder: set HOME or XDG_CACHE_HOME to a folder in "
            "which it may write"
        ) from None


def make_private(folder: Path) -> None:
    """Create ``folder`` and its missing parents with mode 0700, which ``Path.mkdir(parents=True)``
    gives to the last folder only; those that exist keep theirs. Raises ``OSError``."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def default_quota_bytes() -> int:
    """Return the quota of the default folder: 50 GiB, or a fifth of its disk if that is less."""
    folder = cache_folder()
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return min(_DEFAULT_QUOTA_BYTES, shutil.disk_usage(place).total // 5)
    return _DEFAULT_QUOTA_BYTES


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
    """Whether this names an S3 Express directory bucket or an access point to one, for which
    signing, listing and permissions differ."""
    return bucket.endswith(("--x-s3", "--xa-s3"))


@dataclass(frozen=True, slots=True)
class Url:
    """The parts of a URL."""

    scheme: str
    shown: str
    """The URL with ``***`` for its user and password."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Hosts and their ports, 0 for the default one; the bucket of ``s3:``."""
    path: str = ""
    """Without outer slashes."""
    root: str = field(default="", repr=False)
    """The URL without its path, but with its user and password."""
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    service: str = ""
    """Name of the primary that the Sentinels watch."""

    @property
    def host(self) -> str:
        """The first host, or the bucket."""
        return self.hosts[0][0]

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https" or self.scheme.startswith("rediss")

    @property
    def is_far(self) -> bool:
        """Whether one of its hosts is another machine."""
        return not all(is_this_machine(host) for host, _ in self.hosts)


def parse_url(setting: str, text: str, name: str | None = None) -> Url:
    """Return the parts of ``text``, a URL for ``setting``, and mask its password from now on.
    Raises ``ValueError``, which names ``name`` or ``setting``, the fault and the right form.

    >>> parse_url("index_url", "rediss://fleet:open@redis.example:6379/0").shown
    'rediss://***@redis.example:6379/0'
    """
    forms, name = FORMS[setting], name or setting
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in forms:
        raise ValueError(f"{name}: {_scheme_fix(forms, text)}")
    try:
        if forms[scheme].endswith(":"):
            if rest:
                raise ValueError("nothing may follow the colon")
            return Url(scheme, text)
        if forms[scheme].endswith(":///PATH"):
            if not rest.startswith("//") or not local_path(text).is_absolute() or "\0" in rest:
                raise ValueError("the path must be absolute")
            return Url(scheme, text)
        return _server(setting, scheme, rest)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}; write {forms[scheme]}") from None


def _scheme_fix(forms: Mapping[str, str], text: str) -> str:
    scheme = text.partition("://")[0]
    if text.startswith("/") and any(form.endswith("/PATH") for form in forms.values()):
        return f"a path needs {'sqlite' if 'sqlite' in forms else 'file'}:// in front of it"
    if scheme in ("s3a", "s3n") and "s3" in forms:
        return f"write s3:// instead of {scheme}://"
    if scheme in _HTTP_FORMS and "s3" in forms:
        return f"write {forms['s3']}, and set s3_endpoint_url to the server, {_HTTP_FORMS[scheme]}"
    return f"write {' or '.join(forms.values())}"


def _server(setting: str, scheme: str, rest: str) -> Url:
    """``rest`` follows the colon."""
    found = _SERVER.fullmatch(rest)
    if found is None:
        raise ValueError("the slashes are missing")
    place, path, query = (found[part] or "" for part in ("place", "path", "query"))
    tail = rest[found.end("place") :]
    _refuse_login(setting, found["login"], tail)
    if found["fragment"] is not None:
        raise ValueError("a fragment (#...) is not used: remove it")
    if not rest.isprintable() or " " in place:
        raise ValueError("it contains a space or a control character: remove it")
    user, _, password = (found["login"] or "").partition(":")
    keep_secret(password)
    hosts, service = _hosts(scheme, place), ""
    if scheme.endswith("+sentinel"):
        if (named := _SERVICE.fullmatch(query)) is None:
            raise ValueError("?service= and the name of the primary must end it")
        service = named[1]
    elif query:
        raise ValueError(
            "a query (?...) is not used: remove it; region, TLS and deadlines are settings"
        )
    if scheme.startswith("redis"):
        database = _DATABASE.fullmatch(path)
        if database is None:
            raise ValueError("the path must be the number of a database")
        if scheme.endswith("+cluster") and int(database[1] or 0):
            raise ValueError("a cluster has only database 0")
    login = "" if found["login"] is None else "***@"
    shown = f"{scheme}://{login}{place}{tail}"
    root = f"{scheme}:{rest[: found.end('place')]}"
    user, password = unquote(user), unquote(password)
    return Url(scheme, shown, hosts, path.strip("/"), root, user, password, service)


def _refuse_login(setting: str, login: str | None, tail: str) -> None:
    """Refuse a login that is not used, or whose characters end it too early."""
    if setting in ("bulk_url", "s3_endpoint_url") and (login is not None or "@" in tail):
        raise ValueError(
            "a user, a password or an @ is not used: set s3_access_key_id and s3_secret_access_key"
        )
    # Clients quote what is in brackets, which they take for an address.
    if "@" in tail or (setting == "proxy" and set("[]") & set(login or "")):
        instead = ", or set redis_username and redis_password" if setting == "index_url" else ""
        raise ValueError(
            "user and password must be percent-encoded (% as %25, / as %2F, ? as %3F, # as %23, "
            f"@ as %40, [ as %5B, ] as %5D){instead}"
        )


def _hosts(scheme: str, place: str) -> tuple[tuple[str, int], ...]:
    """Return the hosts in ``place`` with their ports, or the bucket."""
    if scheme == "s3":
        if not place:
            raise ValueError("it names no bucket")
        if not _BUCKET.fullmatch(place):
            raise ValueError(
                "s3:// must be followed by a bucket, whose name has only letters, digits, dots, "
                "underscores and hyphens; a server belongs in s3_endpoint_url"
            )
        return ((place, 0),)
    hosts = []
    for one in place.split(","):
        found = _HOST_PORT.fullmatch(one)
        if found is None or not (_is_host(found[1]) and int(found[2] or 1) in _PORTS):
            raise ValueError("each host must be HOST or HOST:PORT, an IPv6 address in brackets")
        hosts.append((found[1].strip("[]"), int(found[2] or 0)))
    if len(hosts) > 1 and "+" not in scheme:
        raise ValueError("it may name only one host")
    return tuple(hosts)


def _is_host(name: str) -> bool:
    """Whether a name that must be an address is one."""
    if not _ADDRESS_ONLY.fullmatch(name):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a name or an address of the loopback interface. Names are not resolved: a
    DNS server could then allow traffic without TLS."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return f".{name}".endswith(".localhost")


def parse_endpoint(text: str) -> tuple[str, Url]:
    """Return an HTTP server's URL, with ``http://`` without a scheme, and its parts. Raises
    ``ConfigError``, also for a proxy's URL, which clients would quote."""
    whole = text if "://" in text else f"http://{text}"
    try:
        place = parse_url("endpoint", whole)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    if place.is_far:  # clients of this machine use no proxy, and others read all variables
        check_proxies("http_proxy", "https_proxy", "all_proxy")
    return whole, place


def check_proxies(*names: str) -> None:
    """Mask the passwords in these variables, in either case. Raises ``ConfigError``."""
    for name, text in os.environ.items():
        if name.lower() in names and text.strip():
            try:
                parse_url("proxy", text if "://" in text else f"http://{text}", name)
            except ValueError as exc:
                raise ConfigError(str(exc)) from None


def refuse_clear(name: str, url: Url) -> None:
    """Raise ``ValueError``, which names the fix, if ``url`` uses another machine without TLS."""
    if url.is_far and not url.is_tls:
        is_bulk = url.scheme == "http"
        secure = "https" if is_bulk else url.scheme.replace("redis", "rediss", 1)
        raise ValueError(
            f"{name} {url.shown}: credentials and payloads would cross the network unencrypted; "
            f"write {secure}://, or set allow_plaintext to {'bulk' if is_bulk else 'index'} on a "
            "trusted network"
        )


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 host is in brackets. Raises ``ValueError``.

    >>> parse_address("127.0.0.1:9410"), parse_address("[::1]:9410")
    (('127.0.0.1', 9410), ('::1', 9410))
    """
    found = _HOST_PORT.fullmatch(address)
    if found is None or not (_is_host(found[1]) and int(found[2] or _PORTS.stop) < _PORTS.stop):
        raise ValueError("write HOST:PORT, an IPv6 address in brackets: [::1]:9410")
    return found[1].strip("[]"), int(found[2])
