"""Which bulk stores lie behind a network, for the choice of a codec."""

import pytest

from objkv.config import Config
from objkv.connector.kv.worker import _is_far


@pytest.mark.parametrize(
    ("bulk_url", "endpoint", "far"),
    [
        ("s3://bucket/prefix", None, True),
        ("s3://bucket", "https://s3.example.org", True),
        ("s3://bucket", "https://10.0.0.7:9000", True),
        ("s3://bucket", "http://127.0.0.1:9000", False),
        ("s3://bucket", "http://localhost:9000", False),
        ("s3://bucket", "http://[::1]:9000", False),
        ("file:///tmp/x", None, False),
        ("memory:", None, False),
    ],
)
def test_only_a_bucket_on_another_machine_is_far(
    bulk_url: str, endpoint: str | None, far: bool
) -> None:
    assert _is_far(Config(bulk_url=bulk_url, s3_endpoint_url=endpoint)) is far
