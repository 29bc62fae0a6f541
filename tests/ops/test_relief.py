"""A full folder is swept by one replica at a time, in a process of its own, which may fail."""

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from objkv.assembly.backends import open_backends
from objkv.assembly.quota import open_room, sweep_settings
from objkv.cache.quota import Quota
from objkv.config import Config
from objkv.errors import StoreUnavailable
from objkv.index.memory import MemoryIndex
from objkv.ops.relief import Relief
from objkv.telemetry import MemoryRecorder, NullRecorder
from tests.ops.world import NAMESPACE, save, save_identity

BOUND_S = 120


def relief(index: MemoryIndex, program: str, recorder: MemoryRecorder, **settings: str) -> Relief:
    return Relief(index, settings, recorder, command=[sys.executable, "-c", program])


def test_one_of_a_machines_replicas_sweeps_and_not_again_soon(tmp_path: Path) -> None:
    program = "import os; open(os.environ['FILE'], 'a').write('swept\\n')"
    index, recorder, file = MemoryIndex(), MemoryRecorder(), tmp_path / "file"
    replicas = [relief(index, program, recorder, FILE=str(file)) for _ in range(3)]
    assert [replica() for replica in replicas] == [True, False, False]
    assert not replicas[0]()
    assert file.read_text() == "swept\n"
    assert (recorder.value("sweeps"), recorder.value("sweep_errors")) == (1, 0)


def test_a_sweep_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    recorder = MemoryRecorder()
    caplog.set_level(logging.WARNING)
    assert relief(MemoryIndex(), "import sys; sys.exit('no index')", recorder)()
    assert "code=1 error=no index" in caplog.text
    assert recorder.value("sweep_errors") == 1


def test_a_program_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    recorder = MemoryRecorder()
    caplog.set_level(logging.WARNING)
    assert Relief(MemoryIndex(), {}, recorder, command=["/nowhere/objkv"])()
    assert "/nowhere/objkv" in caplog.text


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
    assert relief_after_close(one) == (0, "")


def relief_after_close(one: Relief) -> tuple[int, str]:
    return one._run()


def config(tmp_path: Path, **changes: Any) -> Config:
    values = {
        "bulk_url": f"file://{tmp_path}/chunks",
        "index_url": f"sqlite://{tmp_path}/i.sqlite",
        "sweep_grace_s": 0,
    }
    return Config.model_validate(values | changes)


def test_a_full_folder_is_swept_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real program, as a replica starts it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda name: None)  # a busy machine would not get to it
    with open_backends(config(tmp_path), NullRecorder()) as backends:
        save_identity(backends.bulk)
        save(backends.bulk, backends.index, list(range(160)))
        [usage] = backends.index.usage()
    settings = config(tmp_path, quota_bytes=usage.nbytes, quota_low_percent=50)
    recorder = MemoryRecorder()
    with open_backends(settings, NullRecorder()) as backends:
        room = open_room(settings, backends, recorder)
        assert isinstance(room, Quota)
        room.read()
        assert not room.has_room()
        room._relieve()
        assert room.has_room()
        [left] = backends.index.usage()
        assert 0 < left.nbytes <= usage.nbytes // 2
        depths = sorted(record.token_start for record in backends.index.scan(NAMESPACE))
        assert depths == [16 * depth for depth in range(len(depths))], "ends go first"
        room.close()
    assert (recorder.value("sweeps"), recorder.value("sweep_errors")) == (1, 0)


def test_a_sweep_has_the_replicas_settings(tmp_path: Path) -> None:
    settings = sweep_settings(config(tmp_path, quota_bytes=10, ttl_s=7, tenant="a"))
    again = Config.model_validate(
        {name.removeprefix("OBJKV_").lower(): value for name, value in settings.items()}
    )
    assert (again.ttl_s, again.tenant, again.role) == (7, "a", "sweeper")
    assert again.quota_high_percent == again.quota_low_percent == 85
