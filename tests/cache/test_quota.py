"""Saves stop at a quota, according to background readings, and resume when there is room again."""

import logging
import os
import sys
import threading
import time
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import pytest

from objkv.assembly.backends import open_backends, open_room, sweep_settings
from objkv.cache.quota import _ENDED, AutoSweep, Quota, TenantUsage, read_tenant
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.index.base import Usage
from objkv.keys.identity import identity_path
from objkv.ops.sweep.sweep import SWEPT_PERCENT
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.support.samples import IDENTITY, NAMESPACE, save, save_identity
from tests.support.waiting import wait_until

BOUND_S = 120


def relief(
    index: MemoryIndex, program: str, recorder: MemoryRecorder, **settings: str
) -> AutoSweep:
    sweep = AutoSweep(index, settings, recorder)
    sweep._command = [sys.executable, "-c", program]
    return sweep


@pytest.mark.parametrize(
    ("rebuild", "swept", "logged"),
    [
        ("pass", "sweep --apply --json --force", ""),
        ("sys.exit(3)", "sweep --apply --json", "rebuilding the index of a full folder failed"),
        ("time.sleep(600)", "sweep --apply --json", "error=still running after"),
    ],
)
def test_one_of_a_machines_replicas_sweeps_and_what_the_index_lacks_is_believed_after_a_rebuild(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rebuild: str,
    swept: str,
    logged: str,
) -> None:
    program = (
        "import os, sys, time; open(os.environ['FILE'], 'a').write(' '.join(sys.argv[1:]) + '\\n')"
        f"\nif sys.argv[1] == 'rebuild': {rebuild}"
    )
    run, bounds = AutoSweep._run, iter([1.0 if "sleep" in rebuild else BOUND_S, BOUND_S])

    def bounded(one: AutoSweep, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("objkv.cache.quota._BOUND_S", next(bounds))
        return run(one, *arguments)

    monkeypatch.setattr(AutoSweep, "_run", bounded)
    caplog.set_level(logging.WARNING)
    index, recorder, file = MemoryIndex(), MemoryRecorder(), tmp_path / "file"
    replicas = [relief(index, program, recorder, FILE=str(file)) for _ in range(3)]
    assert [replica() for replica in replicas] == [True, False, False]
    assert not replicas[0]()
    assert file.read_text().splitlines()[-1] == swept
    assert logged in caplog.text
    assert (recorder.value("sweeps"), recorder.value("sweep_errors")) == (1, 0)


@pytest.mark.parametrize(
    ("ends", "logged", "errors"), [("'no index'", "code=1 error=no index", 1), ("1", "", 0)]
)
def test_a_sweep_that_fails_is_told_and_one_that_leaves_something_has_not_failed(
    caplog: pytest.LogCaptureFixture, ends: str, logged: str, errors: int
) -> None:
    recorder = MemoryRecorder()
    caplog.set_level(logging.WARNING)
    program = f"import sys; sys.exit({ends} if sys.argv[1] == 'sweep' else 0)"
    assert relief(MemoryIndex(), program, recorder)()
    assert logged in caplog.text
    assert recorder.value("sweep_errors") == errors


@pytest.mark.slow
def test_nothing_is_imported_from_the_folder_that_the_engine_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "objkv").mkdir()
    (tmp_path / "objkv" / "__init__.py").write_text("open('planted', 'w')\nraise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    recorder = MemoryRecorder()
    bulk = tmp_path / "bulk"
    bulk.mkdir()
    settings = {"OBJKV_BULK_URL": f"file://{bulk}", "OBJKV_INDEX_URL": "bulk:"}
    AutoSweep(MemoryIndex(), settings, recorder)()
    assert not (tmp_path / "planted").exists()


def test_an_index_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object, **options: object) -> bool:
        raise StoreUnavailable("gone")

    index, recorder = MemoryIndex(), MemoryRecorder()
    monkeypatch.setattr(index, "lease", gone)
    assert relief(index, "", recorder)()
    assert recorder.value("sweep_errors") == 1


def test_closing_ends_a_sweep_under_way() -> None:
    one = relief(MemoryIndex(), "import time; time.sleep(600)", MemoryRecorder())
    thread = threading.Thread(target=one)
    thread.start()
    while one._process is None:
        assert thread.is_alive()
    one.close()
    thread.join(BOUND_S)
    assert not thread.is_alive()
    one.close()
    before = one._process
    assert one._make_room() == (_ENDED, "")
    assert before is one._process is None, "nothing is started any more"


def config(tmp_path: Path, **changes: Any) -> Config:
    values = {
        "bulk_url": f"file://{tmp_path}/chunks",
        "index_url": f"sqlite://{tmp_path}/i.sqlite",
        "sweep_grace_s": 0,
    }
    return Config.model_validate(values | changes)


@pytest.mark.slow
@pytest.mark.parametrize(("age_s", "is_indexed"), [(10, True), (10, False), (3 * 86_400, False)])
def test_a_full_folder_is_swept_until_there_is_room_though_its_index_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: int, is_indexed: bool
) -> None:
    """By the real program, as a replica starts it. The file of the index was deleted a moment ago,
    or nobody used it for longer than records live."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda name: None)  # a busy machine would not get to it
    with open_backends(config(tmp_path), NullRecorder()) as backends:
        save_identity(backends.bulk)
        save(backends.bulk, backends.index if is_indexed else None, list(range(160)))
        used = sum(entry.nbytes for entry in backends.bulk.scan(f"{NAMESPACE}/"))
    then = time.time() - age_s
    for file in (tmp_path / "chunks").rglob("*.safetensors"):
        os.utime(file, (then, then))
    settings = config(tmp_path, quota_bytes=used, sweep_grace_s=3_600)
    recorder = MemoryRecorder()
    with open_backends(settings, NullRecorder()) as backends:
        room = open_room(settings, backends, recorder)
        assert isinstance(room, Quota)
        room.read()
        assert room.is_full  # to ask for room would begin a thread that relieves, too
        room.relieve()
        assert not room.is_full
        [left] = backends.index.usage()
        assert 0 < left.nbytes <= used * SWEPT_PERCENT // 100
        depths = sorted(record.token_start for record in backends.index.scan(NAMESPACE))
        assert depths == [16 * depth for depth in range(len(depths))], "ends go first"
        room.close()
    assert (recorder.value("sweeps"), recorder.value("sweep_errors")) == (1, 0)


@pytest.mark.parametrize("index", [{}, {"index_url": "bulk:"}], ids=["sqlite", "bulk"])
def test_the_tenants_payloads_count(tmp_path: Path, index: dict[str, str]) -> None:
    settings = config(tmp_path, quota_bytes=1_000, **index)
    with open_backends(settings, NullRecorder()) as backends:
        room = open_room(settings, backends, MemoryRecorder())
        assert isinstance(room, Quota)
        save_identity(backends.bulk)
        room.read()
        assert room._bytes == 0
        save(backends.bulk, backends.index)
        room.read()
        nbytes = sum(one.nbytes for one in backends.index.usage())
        assert room._bytes == nbytes
        assert not room.has_room()
        room.close()
        assert open_room(config(tmp_path), backends, NullRecorder()) is None, "without a quota"


def test_a_sweep_has_the_replicas_settings_and_keys(tmp_path: Path) -> None:
    """Wherever they were set: without the keys a rebuild restores nothing that is sealed, and what
    has no record is swept."""
    given = {"quota_bytes": 10, "ttl_s": 7, "tenant": "a", "signing_keys_file": f"{tmp_path}/keys"}
    settings = sweep_settings(config(tmp_path, **given))
    again = {name.removeprefix("OBJKV_").lower(): value for name, value in settings.items()}
    found = Config.model_validate({n: v for n, v in again.items() if "keys" not in n})
    assert (found.ttl_s, found.tenant, found.role) == (7, "a", "sweeper")
    assert settings["OBJKV_SIGNING_KEYS_FILE"] == f"{tmp_path}/keys"
    assert "OBJKV_ENCRYPTION_KEYS_FILE" not in settings


@pytest.fixture
def recorder() -> MemoryRecorder:
    return MemoryRecorder()


def test_a_full_place_takes_nothing_until_it_has_room(
    recorder: MemoryRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """What this process saves counts at once, and what cannot be read changes nothing."""
    caplog.set_level(logging.WARNING)
    used: list[Any] = []

    def read() -> int:
        if used[-1] is None:
            raise StoreUnavailable("gone")
        return int(used[-1])

    quota = Quota(read, 100, recorder)
    quota.add(1_000)  # not read yet: the first reading will count it
    for found, is_full in ((99, False), (100, True), (None, True), (150, True), (0, False)):
        used.append(found)
        quota.read()
        assert quota.is_full is is_full
    quota.add(99)
    used.append(None)
    quota.read()
    assert not quota.is_full
    quota.add(1)
    assert quota.is_full
    assert recorder.value("quota_errors") == 2
    assert [r.getMessage() for r in caplog.records] == [
        "quota reached, saves stopped used_bytes=100 limit_bytes=100",
        "below quota, saves resumed used_bytes=0 limit_bytes=100",
        "quota reached, saves stopped used_bytes=100 limit_bytes=100",
    ]
    assert not quota.has_room()
    quota.close()


def test_the_first_question_begins_reading_and_does_not_wait_for_it(
    recorder: MemoryRecorder,
) -> None:
    begun, go_on = Event(), Event()

    def slow() -> int:
        begun.set()
        assert go_on.wait(BOUND_S)
        return 100

    quota = Quota(slow, 100, recorder)
    assert quota._thread is None
    assert quota.has_room()
    assert begun.wait(BOUND_S)
    assert quota.has_room()
    go_on.set()
    quota.close()
    assert quota._thread is not None
    quota._thread.join(BOUND_S)
    assert not quota._thread.is_alive()
    assert not quota.has_room()


def test_nothing_ends_the_thread_and_the_log_tells_it_once(
    recorder: MemoryRecorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.cache.quota._INTERVAL_S", 0.0)
    monkeypatch.setattr("objkv.cache.quota._SHARE_MAX", 1e9)
    readings = Queue[int]()

    def used() -> int:
        if readings.qsize() < 3:
            readings.put(0)
            raise RecursionError
        readings.put(100)
        return 100

    quota = Quota(used, 100, recorder)
    for _ in range(4):
        seen = readings.qsize()
        quota.has_room()
        wait_until(lambda seen=seen: readings.qsize() > seen, "a reading")
    wait_until(lambda: not quota.has_room(), "the quota")
    quota.close()
    assert recorder.value("quota_errors") == 3
    assert [r.getMessage() for r in caplog.records if r.exc_info] == [
        "reading how much is stored failed"
    ]


def test_closed_before_it_was_asked_it_starts_nothing(recorder: MemoryRecorder) -> None:
    quota = Quota(lambda: 0, 100, recorder)
    quota.close()
    quota.close()
    assert quota.has_room()
    assert quota._thread is None


def test_only_the_tenants_own_namespaces_count_once_their_documents_are_there() -> None:
    bulk = MemoryStore()
    usages = [Usage(NAMESPACE, 7, 1, 0), Usage("f" * 32, 100, 1, 0)]
    used = TenantUsage(lambda: usages, bulk, IDENTITY.tenant)
    assert used() == 0
    save_identity(bulk)
    assert used() == 7
    assert TenantUsage(lambda: usages, bulk, "somebody")() == 0
    bulk.delete(identity_path(NAMESPACE))
    assert used() == 7, "read once"


@pytest.mark.parametrize("document", [b"", b"{}", b'{"tenant": "default"}', b"[" * 100_000])
def test_a_document_that_is_not_the_namespaces_own_names_no_tenant(document: bytes) -> None:
    """Else one tenant could use up another's quota."""
    bulk = MemoryStore()
    bulk.put(identity_path(NAMESPACE), document)
    assert read_tenant(bulk, NAMESPACE) is None
