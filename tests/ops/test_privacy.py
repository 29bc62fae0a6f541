"""What the doctor says of folders and files that other users can reach."""

import os
from pathlib import Path

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import Config
from objkv.ops.doctor import doctor as privacy
from objkv.ops.doctor.doctor import check_privacy
from objkv.telemetry import NullRecorder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that everybody can get to."""
    may_enter = privacy._may_enter
    monkeypatch.setattr(privacy, "_may_enter", lambda f: tmp_path.is_relative_to(f) or may_enter(f))
    tmp_path.chmod(0o755)
    return tmp_path


def config(place: Path) -> Config:
    return Config(bulk_url=f"file://{place}/chunks", index_url=f"sqlite://{place}/index.sqlite")


def found(place: Path) -> list[tuple[str, str]]:
    return [(check.area, check.status) for check in check_privacy(config(place))]


def test_what_is_not_there_and_what_is_no_file_is_not_looked_at(tmp_path: Path) -> None:
    assert found(tmp_path / "missing") == []
    far = Config(bulk_url="s3://bucket", index_url="rediss://host")
    assert check_privacy(far) == []


def test_what_others_cannot_reach_is_well(place: Path) -> None:
    private = place / "private"
    private.mkdir(0o700)
    (private / "chunks").mkdir()
    (private / "chunks").chmod(0o777)
    (private / "index.sqlite").touch(0o666)
    assert found(private) == [("bulk", "ok"), ("index", "ok")]
    assert all("cannot reach" in check.detail for check in check_privacy(config(private)))


def test_where_others_may_write_is_a_warning_that_says_what_to_do(place: Path) -> None:
    (place / "chunks").mkdir()
    (place / "chunks").chmod(0o777)
    (place / "index.sqlite").touch()
    (place / "index.sqlite").chmod(0o600)
    (place / "index.sqlite-wal").touch()
    (place / "index.sqlite-wal").chmod(0o666)
    assert found(place) == [("bulk", "warning"), ("index", "warning")]
    bulk, index = check_privacy(config(place))
    assert bulk.fix == f"chmod o-w {place}/chunks"
    assert index.fix == f"chmod o-w {place}/index.sqlite-wal"


def test_where_others_may_read_is_told(place: Path) -> None:
    (place / "chunks").mkdir()
    (place / "chunks").chmod(0o755)
    (place / "index.sqlite").touch()
    (place / "index.sqlite").chmod(0o600)
    bulk, index = check_privacy(config(place))
    assert bulk.status == index.status == "ok"
    assert "can read" in bulk.detail
    assert "cannot reach" in index.detail


def test_the_default_place_is_private(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    monkeypatch.delenv("OBJKV_BULK_URL", raising=False)
    old = os.umask(0)
    try:
        with open_backends(Config(), NullRecorder()) as backends:
            backends.bulk.put("ns/value", b"")
            backends.index.check()
    finally:
        os.umask(old)
    assert (place / "objkv").stat().st_mode & 0o777 == 0o700
    assert all("cannot reach" in check.detail for check in check_privacy(Config()))
    assert len(check_privacy(Config())) == 2
