"""Fixtures that start real servers. Import new ones here by name, so that pytest finds them."""

from tests.support.servers.fixtures import (
    certificates,
    cluster,
    mortal_cluster,
    redis_alone,
    redis_tls,
    s3_prefixes,
    s3_server,
    sentinel,
    valkey,
)

__all__ = [
    "certificates",
    "cluster",
    "mortal_cluster",
    "redis_alone",
    "redis_tls",
    "s3_prefixes",
    "s3_server",
    "sentinel",
    "valkey",
]
