"""What Redis's errors are to whoever uses the index, and what to do about them."""

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from objkv.errors import StoreDenied, StoreError, StoreUnavailable

# By word where the class does not tell: inside a script, servers wrap the error's own first word.
_LATER_WORDS = re.compile(
    r"\b(LOADING|MASTERDOWN|NOREPLICAS|BUSY|MISCONF|READONLY|CLUSTERDOWN|TRYAGAIN|MOVED|ASK)\b"
)
_LATER = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
    exceptions.ReadOnlyError,
    # Raised while no node of a cluster can be reached; not a RedisError.
    exceptions.RedisClusterException,
)
_LOGIN_WORDS = re.compile(r"\b(NOAUTH|WRONGPASS|DENIED)\b")
_LOGIN = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)
_RIGHTS_WORDS = re.compile(
    r"\bNOPERM\b|ACL failure in script|can't run this command|can't access at least one"
)


@contextmanager
def translated(verb: str) -> Iterator[None]:
    """Raise redis-py's exceptions as a ``StoreError`` that says who can act."""
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException) as exc:
        kind, words = _meaning(exc)
        raise kind(f"redis index, {verb}: {words}") from exc


def _meaning(exc: Exception) -> tuple[type[StoreError], str]:
    """What ``exc`` is to objkv, and its words with what to fix."""
    words = str(exc) or type(exc).__name__
    chain = list(_chain(exc))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in chain):
        fix = "set redis_ca_file to the PEM file that signs the server's certificate"
        return StoreDenied, f"{words}: {fix}"
    if any(isinstance(c, exceptions.NoPermissionError) for c in chain) or _RIGHTS_WORDS.search(
        words
    ):
        fix = "give the user the rights that objkv access prints, or set role to those it has"
        return StoreDenied, f"{words}: {fix}"
    if any(isinstance(cause, _LOGIN) for cause in chain) or _LOGIN_WORDS.search(words):
        return StoreDenied, f"{words}: check redis_username and redis_password"
    if "Cluster mode is not enabled" in words:
        return StoreDenied, f"{words}: index_url should begin with redis:// or rediss://"
    if isinstance(exc, exceptions.OutOfMemoryError) or "OOM" in words:
        fix = "raise the server's maxmemory, or let it evict: maxmemory-policy volatile-lru"
        return StoreUnavailable, f"{words}: {fix}"
    if isinstance(exc, exceptions.MovedError):
        fix = "a cluster's index_url begins with redis+cluster:// or rediss+cluster://"
        return StoreUnavailable, f"{words}: {fix}"
    if isinstance(exc, _LATER) or _LATER_WORDS.search(words):
        return StoreUnavailable, words
    return StoreError, words


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__
