"""What the harness does with an engine that did not hear that it is to end, or does not end."""

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import endings
from tests.engine.conftest import TIMEOUT_S
from tests.engine.harness import environment
from tests.engine.loglines import PACKAGE
from tests.support.servers.redis import wait_until

DEAF_AT_FIRST = """
import os, signal
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
print(f"(EngineCore pid={os.getpid()}) ready", flush=True)
while len(told) < 2:
    signal.pause()
print("EngineCore: trigger received signal=SIGTERM", flush=True)
"""


@pytest.mark.usefixtures("at_once")
def test_an_engine_that_did_not_hear_is_told_again_once_vllm_has_told_it(tmp_path: Path) -> None:
    log_file = tmp_path / "server.log"
    with log_file.open("wb") as log:
        engine = subprocess.Popen([sys.executable, "-c", DEAF_AT_FIRST], stdout=log)
    told = endings.EngineTold(log_file)
    try:
        wait_until(lambda: "ready" in log_file.read_text(), "the engine to start")
        assert not told()
        engine.terminate()
        with log_file.open("a") as log:
            log.write("send sigterm to process EngineCore\n")
        wait_until(told, "the engine to be told")
        assert engine.wait(120) == 0
    finally:
        engine.kill()
        engine.wait()


@pytest.mark.usefixtures("at_once")
def test_an_engine_that_is_gone_is_not_told(tmp_path: Path) -> None:
    engine = subprocess.Popen([sys.executable, "-c", ""])
    engine.wait()
    log_file = tmp_path / "server.log"
    log_file.write_text(
        f"(EngineCore pid={engine.pid}) ready\nsend sigterm to process EngineCore\n"
    )
    told = endings.EngineTold(log_file)
    assert [told(), told(), told()] == [False] * 3


IN_OBJKV = f"{PACKAGE}made_up.py"
IN_VLLM = f"{Path(PACKAGE).parent}/.venv/lib/site-packages/vllm/made_up.py"
"""As in a clone that is called objkv."""
HANGS = """
import sys, threading, time
main, other = (compile("def hang(): time.sleep(600)", file, "exec") for file in sys.argv[1:3])
exec(other)
threading.Thread(target=hang, daemon=sys.argv[3] == "daemon").start()
exec(main)
print("ready", flush=True)
sys.argv[3] == "joined" or hang()
"""


@pytest.mark.parametrize(
    ("main", "other", "how", "is_ours"),
    [
        (IN_VLLM, IN_VLLM, "daemon", False),
        (IN_VLLM, IN_OBJKV, "daemon", False),
        (IN_OBJKV, IN_VLLM, "daemon", True),
        (IN_VLLM, IN_VLLM, "joined", False),
        (IN_VLLM, IN_OBJKV, "joined", True),
    ],
)
def test_what_hangs_is_killed_and_is_a_failure_only_if_it_is_objkv(
    main: str, other: str, how: str, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "END_S", 0.01)
    log_file = tmp_path / "server.log"
    command = [sys.executable, "-c", HANGS, main, other, how]
    with log_file.open("wb") as log:
        hanging = subprocess.Popen(
            command, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    wait_until(lambda: "ready" in log_file.read_text(), "the process to hang")
    if is_ours:
        with pytest.raises(RuntimeError, match="objkv did not end"):
            endings.exit_status(hanging, log_file)
    else:
        with pytest.warns(UserWarning, match="vLLM did not end"):
            assert endings.exit_status(hanging, log_file) is None
    assert hanging.wait(60) == -signal.SIGABRT
    assert main in log_file.read_text() or how == "joined"


STACKS = f"""(Worker pid=7) INFO 11-22 19:36:56 [worker.py:9] objkv: 2 saves left
Fatal Python error: Aborted

Thread 0x00007f5e (most recent call first):
  File "{PACKAGE}transfer/saver.py", line 99 in _work
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f5f (most recent call first):
  File "%s", line 193 in cancel
  File "/usr/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap
  File "<string>", line 1 in <module>

Extension modules: numpy
"""


@pytest.mark.parametrize(("file", "is_ours"), [(IN_VLLM, False), (IN_OBJKV, True)])
def test_a_worker_is_known_by_its_main_thread(file: str, is_ours: bool) -> None:
    assert endings.waits_for_objkv(STACKS % file) is is_ours
    assert not endings.waits_for_objkv(STACKS.partition("Fatal")[0])


def test_each_waits_clearly_longer_than_what_it_waits_for() -> None:
    waits = (endings.DRAIN_S, endings.WORKER_S, endings.ENGINE_S, endings.END_S)
    assert all(2 * inner <= outer for inner, outer in itertools.pairwise(waits))
    assert 2 * endings.ENGINE_S < endings.END_S  # an engine that a terminal tells, and its parent
    assert endings.END_S < TIMEOUT_S / 4


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "AGAIN_S", 0.0)
