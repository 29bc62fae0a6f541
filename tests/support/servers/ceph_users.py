"""Users of a radosgw with policies of their own, as IAM gives them elsewhere.

Ceph 16 judges by them whatever the bucket's owner; conditions on ``s3:prefix`` are honoured.
"""

import json
from typing import Any

import boto3

from tests.support.servers.ceph import S3Server

_POLICY = "objkv"


class CephUsers:
    """Makes users of ``server``, and says what they may do."""

    def __init__(self, server: S3Server) -> None:
        self._server = server
        server.admin("caps", "add", "--uid=test", "--caps=user-policy=*")
        self._iam: Any = boto3.client(
            "iam",
            endpoint_url=server.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
        )

    def add(self, name: str, policy: dict[str, Any]) -> tuple[str, str]:
        """Make a user; its access key and secret key."""
        access_key, secret_key = f"{name}-key", f"{name}-secret"
        self._server.admin(
            *("user", "create", f"--uid={name}", f"--display-name={name}"),
            *(f"--access-key={access_key}", f"--secret-key={secret_key}"),
        )
        self.allow(name, policy)
        return access_key, secret_key

    def allow(self, name: str, policy: dict[str, Any]) -> None:
        """Replace what the user may do, from its next request on."""
        document = json.dumps(policy)
        self._iam.put_user_policy(UserName=name, PolicyName=_POLICY, PolicyDocument=document)

    def allow_nothing(self, name: str) -> None:
        """Take the user's policy away."""
        self._iam.delete_user_policy(UserName=name, PolicyName=_POLICY)
