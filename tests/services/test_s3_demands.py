"""A real S3 server whose policy denies puts without an ACL. Ceph 16 knows no condition on the
others: see ``tests/stores/test_s3_enforced.py``."""

from typing import Any

import pytest

from objkv.errors import StoreDenied
from objkv.stores.s3.client import open_s3_client
from objkv.stores.s3.demands import PutDemands
from objkv.stores.s3.store import S3Store
from tests.support.servers.ceph import CephUsers, S3Server
from tests.support.servers.fixtures import BUCKET, PART_BYTES, s3_config

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("ceph")]
ACL = "bucket-owner-full-control"
RESOURCE = {"Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"]}
DEMANDING: dict[str, Any] = {
    "Version": "2012-10-17",
    "Statement": [
        {"Effect": "Allow", "Action": "s3:*", **RESOURCE},
        {
            "Effect": "Deny",
            "Action": "s3:PutObject",
            "Condition": {"StringNotEquals": {"s3:x-amz-acl": ACL}},
            **RESOURCE,
        },
    ],
}


def test_a_policy_that_demands_an_acl(s3_server: S3Server) -> None:
    access_key, secret_key = CephUsers(s3_server).add("demanding", DEMANDING)
    keys = {"s3_access_key_id": access_key, "s3_secret_access_key": secret_key}
    config = s3_config(s3_server, s3_acl=ACL, **keys)
    place: dict[str, Any] = {"bucket": BUCKET, "prefix": "acl", "multipart_bytes": PART_BYTES}
    client = open_s3_client(config)
    store = S3Store(client, demands=PutDemands.of(config), **place)
    for key in ("first", "second"):
        assert store.put_if_absent(key, b"value")
        assert not store.put_if_absent(key, b"value")
    store.put("plain", b"value")
    assert store.get("second") == b"value"
    without = S3Store(client, **place)
    with pytest.raises(StoreDenied, match="s3_acl"):
        without.put_if_absent("third", b"value")
    with pytest.raises(StoreDenied, match="s3_acl"):
        without.put("third", b"value")
    assert store.get("third") is None
    store.close()
