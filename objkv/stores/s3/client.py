"""Opens boto3's client, which has credentials and endpoints, and builds, signs and parses the
requests that move no payload. They are sent on our connections."""

import io
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.awsrequest import AWSResponse, HeadersDict
from botocore.client import Config as ClientConfig
from botocore.exceptions import BotoCoreError, ClientError, SSLError
from botocore.httpsession import get_cert_path
from botocore.retries.quota import RetryQuota
from botocore.utils import get_environ_proxies

from objkv.config import Config
from objkv.config.aws import aws_region, check_credentials, check_endpoint, is_plain, s3_endpoint
from objkv.config.urls import check_proxies, is_this_machine
from objkv.errors import ConfigError, StoreDenied, StoreUnavailable
from objkv.net.deadline import EndsBy, ends_s
from objkv.stores.s3.errors import asks_for_later, error_of, is_busy
from objkv.stores.s3.http import ConnectionFailed, Connections, host_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


DEFAULT_REGION = "us-east-1"
_CONNECT_SHARE = 1 / 3
ATTEMPTS = 4
ATTEMPT_SHARE = 0.9 / ATTEMPTS
"""Share of a call's time that an attempt may take. The rest is for the pauses between attempts."""
_PAUSE_S, _BUSY_PAUSE_S = 0.05, 1.0
"""The longest pause before the third attempt, as the client's: it then doubles. The second does
not wait."""
_COST, _BUSY_COST = 14, 5
"""What a repetition takes of the quota, as the client's."""
_LAST_S: ContextVar[float] = ContextVar("last_s", default=math.inf)
T = TypeVar("T")


@contextmanager
def one_call(deadline_s: float) -> Iterator[None]:
    """Bound one call with all its attempts: it ends within ``deadline_s`` seconds, or when the
    caller's time ends, and starts no attempt that may take longer."""
    now_s = time.monotonic()
    end_s = min(now_s + deadline_s, ends_s())
    attempt_s = max(0.0, end_s - now_s) * ATTEMPT_SHARE
    token = _LAST_S.set(end_s - attempt_s)
    try:
        with EndsBy(end_s):
            yield
    finally:
        _LAST_S.reset(token)


def last_s() -> float:
    """Return the time of ``time.monotonic`` after which this call starts no attempt."""
    return _LAST_S.get()


class Retrier:
    """Repeats requests if that may help; less often if a server fails for long. Thread-safe."""

    def __init__(self) -> None:
        self._quota = RetryQuota()

    def run(self, attempt: Callable[[], T]) -> T:
        attempts, cost = 0, 1
        while True:
            try:
                outcome = attempt()
            except (ClientError, ConnectionFailed, SSLError) as exc:
                attempts += 1
                cost = self._cost(exc, attempts)
                if not cost:
                    raise
            else:
                self._quota.release(cost)
                return outcome

    def _cost(self, error: Exception, attempts: int) -> int:
        """Pause, and return what the next attempt costs; 0 if there is none."""
        pause_s, cost = _PAUSE_S, _COST
        if isinstance(error, ClientError):
            if not asks_for_later(error):
                return 0
            if is_busy(error):
                pause_s, cost = _BUSY_PAUSE_S, _BUSY_COST
        scale = 2 ** (attempts - 2) if attempts > 1 else 0
        is_late = time.monotonic() + scale * _BUSY_PAUSE_S > last_s()
        if attempts == ATTEMPTS or is_late or not self._quota.acquire(cost):
            return 0
        time.sleep(random.random() * pause_s * scale)  # noqa: S311
        return cost


@dataclass(frozen=True, slots=True)
class S3Access:
    """boto3's client, and the connections and repetitions of all requests. Thread-safe."""

    client: "S3Client"
    connections: Connections
    retrier: Retrier

    def close(self) -> None:
        self.client.close()
        self.connections.close()


def open_s3_access(config: Config) -> S3Access:
    """Return client and connections for the settings. Sends nothing yet. Raises ``ConfigError``."""
    if config.s3_ca_bundle is not None and not config.s3_ca_bundle.is_file():
        raise ConfigError(f"s3_ca_bundle: file {config.s3_ca_bundle} does not exist")
    check_credentials(config)
    (named, given), endpoint = s3_endpoint(config), ""
    if given is None or given.is_far:  # clients of this machine use no proxy
        check_proxies("http_proxy", "https_proxy")  # one is for AWS's source of credentials
    settings: Any = _client_config(config)
    try:
        core = botocore.session.get_session()
        session = boto3.session.Session(region_name=aws_region(config), botocore_session=core)
        client: S3Client = session.client(
            "s3",
            endpoint_url=config.s3_endpoint_url,
            region_name=(session.region_name or DEFAULT_REGION).strip(),
            aws_access_key_id=config.s3_access_key_id,
            aws_secret_access_key=config.s3_secret_access_key,
            config=settings,
        )
        endpoint = client.meta.endpoint_url
        bundle = config.s3_ca_bundle or core.get_config_variable("ca_bundle")
    except BotoCoreError as exc:
        raise ConfigError(f"cannot create the S3 client: {exc}") from exc
    except ValueError:
        pass  # it quotes the endpoint, so it must not be chained
    if not endpoint:
        raise ConfigError(
            f"{named}: the AWS client refuses it; write http://HOST:PORT or https://HOST:PORT, the "
            "host in letters, digits, dots and hyphens"
        )
    check_endpoint(config, endpoint, named)
    host = urlsplit(endpoint).hostname or ""
    if get_environ_proxies(endpoint).get(urlsplit(endpoint).scheme) and not is_this_machine(host):
        raise ConfigError(
            f"the environment names a proxy for {endpoint}, but objkv reaches S3 only directly: "
            f"add {host} to no_proxy"
        )
    ca = None
    if endpoint.startswith("https:"):
        # As the client would choose it.
        ca = str(bundle or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True))
    try:
        connections = Connections(
            connect_s=settings.connect_timeout, read_s=settings.read_timeout, ca=ca
        )
    except OSError as exc:
        raise ConfigError(f"{ca}: no certificates of authorities: {exc}") from exc
    events: Any = client.meta.events
    retrier = Retrier()
    events.register("before-send.s3", partial(_send, connections, retrier))
    return S3Access(client, connections, retrier)


def _send(connections: Connections, retrier: Retrier, request: Any, **_: object) -> AWSResponse:
    """Send a request of the client, and return the response with its body. Raises what an error
    says: the client would follow a bucket to another region, and values would not."""
    if time.monotonic() > last_s():
        raise StoreUnavailable("too little time left before the deadline to send a request")
    place = urlsplit(request.url)
    fields = {"Host": host_of(place)}
    for name, text in request.headers.items():
        if name.lower() != "expect":
            fields[name] = text.decode("latin-1") if isinstance(text, bytes) else text
    check_headers(*fields.values())
    target = place._replace(scheme="", netloc="", path=place.path or "/").geturl()
    lines = "".join([f"{name}: {text}\r\n" for name, text in fields.items()])
    head = f"{request.method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")
    body = getattr(request.body, "read", lambda: request.body or b"")()
    url = f"{place.scheme}://{place.netloc}"

    def attempt() -> AWSResponse:
        with connections.ask(url, head, body) as response:
            content = response.read()
        if response.status >= 300:
            raise error_of(request.method, response.status, content)
        headers: Any = HeadersDict(response.headers)
        raw: Any = _Body(content)
        return AWSResponse(request.url, response.status, headers, raw)

    return retrier.run(attempt)


class _Body(io.BytesIO):
    def stream(self) -> Iterator[bytes]:
        yield self.getvalue()


def check_headers(*texts: str) -> None:
    """Raise ``StoreDenied``, without a quote, for a header that only credentials can cause."""
    if not all(is_plain(text.replace(" ", "")) for text in texts if text):
        raise StoreDenied(
            "the AWS credentials contain a line break or a character other than ASCII: correct "
            "them in the AWS profile or role"
        )


def _client_config(config: Config) -> ClientConfig:
    attempt_s = config.load_deadline_ms / 1000 * ATTEMPT_SHARE
    return ClientConfig(
        connect_timeout=attempt_s * _CONNECT_SHARE,
        read_timeout=attempt_s * (1 - _CONNECT_SHARE),
        retries={"mode": "standard", "total_max_attempts": 1},
        # Payloads have their own checksums, and many servers refuse or ignore S3's. A hash of the
        # body in the signature triples the time of a put on loopback: see decision 9.
        s3={
            "addressing_style": config.s3_addressing,
            "payload_signing_enabled": config.s3_signed_payloads,
        },
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_extra=f"objkv/{version('objkv')}",
    )
