"""Finds out why a connection to a Redis failed: TLS to a port without it, or the reverse.

Both look like a slow or dying server: a port without TLS never answers a handshake, and a port with
TLS hangs up on a command. So after such a failure the other kind is tried once. The trial sends no
credentials.
"""

import socket
import ssl
import time
from collections.abc import Iterator

from redis import exceptions

from objkv.net.deadline import ends_s

TRY_S = 1.0
"""How long the trial may take. It is skipped if the call that failed has less time left."""


class WrongTransport(exceptions.RedisError):
    """The server answers only with TLS, or only without. The operator must change index_url, so it
    is not a ``ConnectionError``, which the client would retry."""


class ClearRefused(exceptions.ConnectionError):
    """A connection without TLS to another machine, which is not even tried."""


class NoCredentials(exceptions.ConnectionError):
    """The operator's provider returned no credentials for the login."""


_EXPLAINED = (
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
    if isinstance(exc, exceptions.AuthenticationError) or any(map(_is_explained, _chain(exc))):
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


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _is_explained(exc: BaseException) -> bool:
    """Whether the failure needs no trial."""
    return isinstance(exc, _EXPLAINED)


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
