"""What the doctor says of the way to the stores."""

from typing import Any

import pytest

from objkv.config import Config
from objkv.ops.doctor.doctor import check_login, check_transport


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"bulk_url": "memory:", "index_url": "memory:"}, []),
        ({"bulk_url": "s3://b", "index_url": "rediss://h"}, [("bulk", "ok"), ("index", "ok")]),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "https://h"}, [("bulk", "ok")]),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "http://127.0.0.1:9"}, [("bulk", "ok")]),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "http://h"}, [("bulk", "warning")]),
        ({"bulk_url": "memory:", "index_url": "redis://localhost"}, [("index", "ok")]),
        ({"bulk_url": "memory:", "index_url": "redis+cluster://h"}, [("index", "warning")]),
        ({"bulk_url": "memory:", "index_url": "rediss+cluster://h"}, [("index", "ok")]),
    ],
)
def test_what_crosses_a_network_in_clear_is_a_warning(
    settings: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    checks = check_transport(Config(**settings, allow_plaintext=True))
    assert [(check.area, check.status) for check in checks] == found
    for check in checks:
        assert bool(check.fix) == (check.status == "warning")


def test_the_fix_names_the_scheme() -> None:
    [check] = check_transport(
        Config(
            bulk_url="memory:", index_url="redis+sentinel://u:p@h?service=s", allow_plaintext=True
        )
    )
    assert "write rediss+sentinel://" in check.fix
    assert ":p@" not in str(check)


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"index_url": "memory:"}, False),
        ({"index_url": "redis://localhost"}, False),
        ({"index_url": "rediss://h"}, True),
        ({"index_url": "redis+cluster://h"}, True),
        ({"index_url": "rediss://h", "redis_username": "u"}, True),
        ({"index_url": "rediss://h", "redis_username": "u", "redis_password": "p"}, False),
        ({"index_url": "rediss://u:p@h"}, False),
        ({"index_url": "rediss://h", "redis_cert_file": "/c", "redis_key_file": "/k"}, False),
    ],
)
def test_a_server_that_lets_everybody_in_is_a_warning(
    settings: dict[str, Any], warns: bool
) -> None:
    checks = check_login(Config(bulk_url="memory:", allow_plaintext=True, **settings))
    assert [(check.name, check.status) for check in checks] == [("login", "warning")] * warns
