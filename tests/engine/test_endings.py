"""What the harness does with an engine that did not hear that it is to end."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import endings
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
        assert engine.wait(60) == 0
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


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "AGAIN_S", 0.0)
