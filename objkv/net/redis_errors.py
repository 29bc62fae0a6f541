"""What a failed call to Redis means, and who can act.

A Redis without TLS never answers a handshake, and one with TLS hangs up on a command: both look
like a slow or dying server. So after such a failure the other kind is tried once, without
credentials.
"""

import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis import exceptions

from objkv.errors import SCAN_DENIED, StoreDenied, StoreError, StoreFull, StoreUnavailable
from objkv.net.deadline import ends_s

CLIENT_ERRORS: Final = (exceptions.RedisError, exceptions.RedisClusterException)
"""All exceptions of redis-py."""
TRY_S = 1.0
"""How long the trial may take. It is skipped if the call that failed has less time left."""


class WrongTransport(exceptions.RedisError):
    """The server answers only with TLS, or only without. The operator must change index_url, so it
    is not a ``ConnectionError``, which the client would retry."""


class ClearRefused(exceptions.ConnectionError):
    """A connection without TLS to another machine, which is not even tried."""


class NoCredentials(exceptions.ConnectionError):
    """The operator's provider returned no credentials for the login."""


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
    """Raise redis-py's exceptions as a ``StoreError`` that states who can act. Its message begins
    with ``call``."""
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
    """Return the class for ``exc``, and the fix if there is one."""
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
    for cause in causes:
        if isinstance(cause, WrongTransport):
            return StoreDenied, "" if cause is exc else str(cause)
    if is_of(*_LOGIN) or _LOGIN_WORDS.search(words):
        return StoreDenied, "check redis_username and redis_password, or redis_credentials"
    if "Cluster mode is not enabled" in words:
        return StoreDenied, "use redis:// or rediss:// in index_url"
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
    """Return which role has the right that the server misses, from its message ``words``."""
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


_NEEDS_NO_TRIAL = (
    exceptions.AuthenticationError,
    WrongTransport,
    ClearRefused,
    NoCredentials,
    ConnectionRefusedError,
    socket.gaierror,
    ssl.SSLCertVerificationError,
)


def explained(exc: Exception, host: str, port: int, *, tls: bool) -> Exception:
    """Return ``WrongTransport`` if the server at ``host`` answers only the other kind of connection
    than the one that failed with ``exc``, and otherwise ``exc``."""
    if any(isinstance(cause, _NEEDS_NO_TRIAL) for cause in _causes(exc)):
        return exc
    if ends_s() - time.monotonic() < TRY_S:
        return exc
    if tls and _answers_in_clear(host, port):
        fix = "does not use TLS: write redis instead of rediss in index_url"
        return WrongTransport(f"the server at {host}:{port} {fix}, or use its TLS port")
    if not tls and _answers_with_tls(host, port):
        fix = "requires TLS: write rediss in index_url"
        return WrongTransport(f"the server at {host}:{port} {fix}")
    return exc


def _answers_in_clear(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), TRY_S / 2) as sock:
            sock.settimeout(TRY_S / 2)
            sock.sendall(b"PING\r\n")
            answer = sock.recv(64)
    except OSError:
        return False
    return answer.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM", b"-ERR", b"-DENIED", b"-LOADING"))


def _answers_with_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent; only the handshake matters
    try:
        with (
            socket.create_connection((host, port), TRY_S / 2) as sock,
            context.wrap_socket(sock, server_hostname=host),
        ):
            return True
    except ssl.SSLError as exc:
        # A server that requires a client certificate refuses the handshake in TLS.
        return "ALERT" in str(exc).upper()
    except OSError:
        return False
