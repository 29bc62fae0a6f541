"""Whether an answer means that a key has no value, on servers that refuse to say so.

S3 says 404 for what is missing to whoever may list it. Where that right has a condition on the
prefix, some servers (Ceph 16.2) say 403 instead, because a get names no prefix; to those that
honour the condition a listing of the one key is allowed, and that decides. Directory buckets list
no single keys; their sessions may see all there is, so that what is missing is a 404.
"""

from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from objkv.config import is_directory_bucket
from objkv.stores.s3_client import error_code, is_missing

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def is_absent(client: "S3Client", place: dict[str, Any], error: ClientError) -> bool:
    """Whether ``error``, the answer to a request for ``place``, means that nothing is there. One
    request more where the server did not say; raises what the client raises but ``ClientError``."""
    if is_missing(error):
        return True
    status, code = error_code(error)
    if status != 403 or code not in ("AccessDenied", "403", "Forbidden"):
        return False  # a HEAD's answer does not name why
    if is_directory_bucket(place["Bucket"]):
        return False
    try:
        page = client.list_objects_v2(Bucket=place["Bucket"], Prefix=place["Key"], MaxKeys=1)
    except ClientError:
        return False
    # Listed in order, so that the key itself would be first of all that begin with it.
    return all(found["Key"] != place["Key"] for found in page.get("Contents", ()))
