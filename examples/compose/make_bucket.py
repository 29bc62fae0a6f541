"""Create the bucket of OBJKV_BULK_URL if it is missing. No role of a replica may do this."""

from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from objkv.config import load_config


def main() -> None:
    """Create the bucket; safe to repeat."""
    settings = load_config()
    bucket = urlsplit(settings.bulk_url).netloc
    client = boto3.client(
        "s3",
        endpoint_url=settings.s3_endpoint_url,
        region_name=settings.s3_region or "us-east-1",
        aws_access_key_id=settings.s3_access_key_id,
        aws_secret_access_key=settings.s3_secret_access_key,
        config=Config(s3={"addressing_style": "path"}),
    )
    if bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}:
        print(f"{bucket} exists")
    else:
        client.create_bucket(Bucket=bucket)
        print(f"created {bucket}")


if __name__ == "__main__":
    main()
