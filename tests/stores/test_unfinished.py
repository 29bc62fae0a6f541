"""Leftovers of killed writers: found and discarded, and nothing else with them."""

import os
from pathlib import Path

from objkv.stores.local import LocalStore
from tests.support.servers.quick_s3 import QuickS3
from tests.support.servers.s3_stores import BUCKET, s3_client, s3_store


def test_a_temporary_file_that_became_a_value_is_discarded_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"value")
    os.link(tmp_path / "a" / "b", tmp_path / "a" / "~tmp-1-0")  # killed between link and unlink
    (left,) = store.unfinished()
    assert store.discard(left)
    assert not store.discard(left)
    assert store.get("a/b") == b"value"


def test_a_folder_with_nothing_but_a_leftover_goes_with_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "~tmp-1-0").write_bytes(b"half")
    assert [store.discard(left) for left in store.unfinished()] == [True]
    assert list(tmp_path.iterdir()) == []


def test_uploads_that_nobody_completed_are_aborted() -> None:
    with QuickS3() as server, s3_store(server.url) as store:
        client = s3_client(server.url)
        place = {"Bucket": BUCKET, "Key": "p/a/b"}
        for number in (1, 2):
            upload = client.create_multipart_upload(**place)["UploadId"]
            client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"x" * 10 * number)
        client.create_multipart_upload(Bucket=BUCKET, Key="other/a/b")
        found = list(store.unfinished())
        assert [(left.key, left.nbytes) for left in found] == [("a/b", 10), ("a/b", 20)]
        assert store.discard(found[0])
        assert not store.discard(found[0])
        assert list(store.unfinished()) == found[1:]
        client.close()
