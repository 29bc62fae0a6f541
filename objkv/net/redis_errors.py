"""What a failed call to Redis means, and who can act."""

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis import exceptions

from objkv.errors import SCAN_DENIED, StoreDenied, StoreError, StoreFull, StoreUnavailable

CLIENT_ERRORS: Final = (exceptions.RedisError, exceptions.RedisClusterException)
"""All exceptions of redis-py."""
_TIMED_OUT_OR_CLOSED = (exceptions.ConnectionError, exceptions.TimeoutError)


class NotTried(exceptions.ConnectionError):
    """No connection was tried: it would be clear and leave this machine, or has no credentials."""


# By word, because servers wrap the original error inside a script's error.
_LATER_WORDS = re.compile(
    r"\b(LOADING|MASTERDOWN|NOREPLICAS|BUSY|UNKILLABLE|MISCONF|READONLY|CLUSTERDOWN|TRYAGAIN|MOVED|"
    r"ASK)\b"
)
_LATER = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
    exceptions.ReadOnlyError,
    # Raised while no node of a cluster is reachable; not a RedisError.
    exceptions.RedisClusterException,
)
_WRONG_NAME = re.compile(r"(Hostname|IP address) mismatch")
"""OpenSSL's words for a valid certificate of another host."""
_LOGIN_WORDS = re.compile(r"\b(NOAUTH|WRONGPASS|DENIED)\b")
_LOGIN = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)
_RIGHTS_WORDS = re.compile(
    r"\bNOPERM\b|ACL failure in script|can't run this command|can't access at least one"
)
_COMMAND = re.compile(r"(?:run the|command) '([a-z|]+)'", re.IGNORECASE)
_ALL_ROLES = frozenset(("ping", "hget", "hmget", "hgetall", "get", "exists", "getrange"))


@contextmanager
def translated(call: str) -> Iterator[None]:
    """Raise redis-py's exceptions as a ``StoreError``, whose message begins with ``call``."""
    try:
        yield
    except CLIENT_ERRORS as exc:
        raise translation(call, exc) from exc


def translation(call: str, exc: Exception) -> StoreError:
    """Return the ``StoreError`` for ``exc``, whose message has the fix."""
    words = str(exc) or type(exc).__name__
    kind, fix = _meaning(words, exc)
    return kind(f"{call}: {words.rstrip('.')}: {fix}" if fix else f"{call}: {words}")


def _meaning(words: str, exc: Exception) -> tuple[type[StoreError], str]:
    causes = list(_causes(exc))

    def is_of(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if is_of(ssl.SSLCertVerificationError):
        if _WRONG_NAME.search(words):
            return StoreDenied, "use a name of the server's certificate as the host of index_url"
        fix = "set redis_ca_file to the PEM file of the CA that signed the server's certificate"
        return StoreDenied, fix
    if is_of(exceptions.NoPermissionError) or _RIGHTS_WORDS.search(words):
        return StoreDenied, _rights_fix(words)
    if is_of(*_LOGIN) or _LOGIN_WORDS.search(words):
        return StoreDenied, "check redis_username and redis_password, or redis_credentials"
    if "Cluster mode is not enabled" in words:
        return StoreDenied, "use redis:// or rediss:// in index_url"
    if "DB index is out of range" in words:
        return StoreDenied, "end index_url with the number of a database that the server has"
    if isinstance(exc, exceptions.OutOfMemoryError) or "OOM" in words:
        fix = "raise the server's maxmemory, or allow eviction with maxmemory-policy volatile-lru"
        return StoreFull, fix
    if isinstance(exc, exceptions.MovedError):
        fix = "the server is a cluster: use redis+cluster:// or rediss+cluster:// in index_url"
        return StoreUnavailable, fix
    if isinstance(exc, _LATER) or _LATER_WORDS.search(words):
        return StoreUnavailable, ""
    return StoreError, ""


def _rights_fix(words: str) -> str:
    if "can't access" in words or "no permissions to access" in words:
        return (
            "the ACL covers other keys: set redis_prefix and redis_username of the same tenant, or "
            "the ACL that `objkv access` prints"
        )
    match = _COMMAND.search(words)
    command = match[1].lower() if match else ""
    if command == "scan":
        return SCAN_DENIED
    if command == "unlink":
        return "UNLINK is only in the ACL of the role sweeper: run this as that role"
    if command in _ALL_ROLES:
        return "the ACL of every role has this command: set the one that `objkv access` prints"
    return (
        "the ACL of the role reader only reads: use the role writer or, for commands that remove "
        "or pin, sweeper; a replica with a reader's rights needs OBJKV_ROLE=reader; "
        "set the ACL that `objkv access` prints for the role"
    )


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def with_hint(exc: Exception, *, tls: bool) -> Exception:
    """Return ``exc``, of a failed connection, with a hint if TLS may be why: a server without TLS
    never answers a handshake, and one with TLS hangs up on a command."""
    clear = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)
    if type(exc) not in _TIMED_OUT_OR_CLOSED or any(isinstance(c, clear) for c in _causes(exc)):
        return exc
    scheme = "redis if the server does not use TLS" if tls else "rediss if the server requires TLS"
    return type(exc)(f"{exc} (index_url begins with {scheme})")
