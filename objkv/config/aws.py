"""AWS's own variables, which the AWS client does not read, or reads although they cannot work."""

import os
import re
from typing import Final

from objkv.config.schema import Config
from objkv.config.urls import Url, parse_url, refuse_clear
from objkv.errors import ConfigError

_CREDENTIALS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SECURITY_TOKEN",
)
_PLAIN: Final = re.compile(r"[\x21-\x7e]*")


def is_plain(text: str) -> bool:
    """Whether an HTTP header can carry ``text`` as a credential: printable ASCII, no spaces."""
    return _PLAIN.fullmatch(text) is not None


def aws_region(config: Config) -> str | None:
    """Return the region of ``s3_region`` or ``AWS_REGION``. The AWS client looks further."""
    return config.s3_region or os.environ.get("AWS_REGION", "").strip() or None


def check_credentials(config: Config) -> None:
    """Raise ``ConfigError`` if half of the settings for credentials is missing, or AWS's own would
    be used and are malformed: the error of a request would count as an outage."""
    if (config.s3_access_key_id is None) != (config.s3_secret_access_key is None):
        raise ConfigError("set both s3_access_key_id and s3_secret_access_key, or neither")
    if config.s3_access_key_id:
        return
    for name in _CREDENTIALS:
        if not is_plain(os.environ.get(name, "")):
            raise ConfigError(
                f"{name} contains a space, a line break or a character other than ASCII, so no "
                "request can carry it: set it again without"
            )


def s3_endpoint(config: Config) -> tuple[str, Url | None]:
    """Return the name of the setting with the endpoint, and its parts; None if only AWS's profile
    may have one. Raises ``ConfigError``."""
    if config.s3_endpoint_url:
        return "s3_endpoint_url", parse_url("s3_endpoint_url", config.s3_endpoint_url)
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if text := os.environ.get(name):
                return name, check_endpoint(config, text, name)
    return "endpoint_url of the AWS profile", None


def check_endpoint(config: Config, text: str, name: str) -> Url:
    """Return the parts of an endpoint of AWS's settings. Raises ``ConfigError``."""
    try:
        url = parse_url("s3_endpoint_url", text, name)
        if not config.may_be_clear("bulk"):
            refuse_clear(name, url)
    except ValueError as exc:
        raise ConfigError(str(exc)) from None
    return url
