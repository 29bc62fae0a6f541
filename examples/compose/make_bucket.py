"""Create the bucket of OBJKV_BULK_URL if it is missing. No role of a replica may do this."""

from urllib.parse import urlsplit

from objkv.config import load_config
from objkv.stores.s3.client import open_s3_client


def main() -> None:
    """Create the bucket; safe to repeat."""
    config = load_config()
    bucket = urlsplit(config.bulk_url).netloc
    client = open_s3_client(config)
    try:
        if bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}:
            print(f"{bucket} exists")
        else:
            client.create_bucket(Bucket=bucket)
            print(f"created {bucket}")
    finally:
        client.close()


if __name__ == "__main__":
    main()
