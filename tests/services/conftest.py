"""Fixtures that start real servers. Import new ones here by name, so that pytest finds them."""

from tests.services.redis_fixtures import (
    certificates,
    cluster,
    mortal_cluster,
    redis_alone,
    redis_tls,
    sentinel,
)
from tests.services.s3_fixtures import open_s3_store, s3_prefixes, s3_server

__all__ = [
    "certificates",
    "cluster",
    "mortal_cluster",
    "open_s3_store",
    "redis_alone",
    "redis_tls",
    "s3_prefixes",
    "s3_server",
    "sentinel",
]
