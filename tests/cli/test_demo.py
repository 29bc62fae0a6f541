"""``objkv demo``, all but the replicas: those are in ``tests/engine/test_programs.py``."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from objkv.cli import demo as command_module
from objkv.cli.demo import print_report
from objkv.cli.output import Printer
from objkv.errors import ConfigError
from objkv.ops import demo as demo_module
from objkv.ops.demo import DemoFolder, DemoReport, DemoRow, DemoStore, compare, prompts_of
from objkv.ops.programs import ProgramFailed
from objkv.ops.replica import ReplicaAnswer, ReplicaEnd, ReplicaPrompt, ReplicaSetup, ReportStage
from tests.cli.conftest import Run

PROMPTS = prompts_of("small")
BEFORE = prompts_of("small", "A")


def answers(
    prompts: tuple[ReplicaPrompt, ...], *, seconds: float, served: int = 0, token: int = 7
) -> dict[str, ReplicaAnswer]:
    return {
        prompt.name: ReplicaAnswer(
            prompt=prompt.name, tokens=(token,), served_tokens=served, first_token_s=seconds
        )
        for prompt in prompts
    }


def rows(*, served: int = 512, token: int = 7) -> tuple[DemoRow, ...]:
    return compare(
        PROMPTS,
        answers(PROMPTS, seconds=3.0),
        answers(BEFORE, seconds=3.1),
        answers(PROMPTS, seconds=0.5, served=served, token=token),
    )


def report(shown: tuple[DemoRow, ...], **changes: object) -> DemoReport:
    values: dict[str, object] = {
        "engine": "vLLM 0.32.0",
        "device": "2 cores",
        "rows": shown,
        "load_failures": 0,
        "stored": DemoStore(chunks=15, tokens=3840, nbytes=3 << 20, settings={"OBJKV_X": "y"}),
        "notices": (),
    }
    return DemoReport(**values | changes)  # type: ignore[arg-type]


def printed(capsys: pytest.CaptureFixture[str], shown: DemoReport) -> str:
    print_report(Printer(machine=False), shown)
    return capsys.readouterr().out


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[tuple[DemoRow, ...]]:
    """What the replicas will show, instead of running them."""
    shown = [rows()]

    def live(
        setup: ReplicaSetup,
        log: Path,
        settings: Mapping[str, str],
        report_stage: ReportStage,
        *,
        bound_s: float,
    ) -> tuple[list[ReplicaAnswer], ReplicaEnd]:
        report_stage(setup.role, "starting")
        assert ("OBJKV_BULK_URL" in settings) == (setup.role != "R")
        return [], ReplicaEnd(engine="vLLM 0.32.0", device="2 cores", load_failures=0)

    monkeypatch.setattr(demo_module, "live", live)
    monkeypatch.setattr(demo_module, "compare", lambda *_: shown[0])
    monkeypatch.setattr(command_module, "find_spec", lambda name: object())
    return shown


def test_the_table_tells_each_prompt_and_the_median(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, report(rows()))
    asked, shared = out.splitlines()[5:7]
    assert asked.split() == [
        *["document", "1,", "question", "1", "812", "512", "3.00", "3.10", "0.50", "6.0x", "yes"]
    ]
    assert shared.split() == [
        *["document", "1,", "question", "2", "812", "512", "3.00", "–", "0.50", "6.0x", "yes"]
    ]
    assert "Median speed-up: 6.0x. Stored: 15 chunks, 3,840 tokens, 3.0 MiB." in out
    assert "not a benchmark" in out


def test_the_command_ends_with_one_if_it_did_not_show_what_it_should(
    run: Run, replicas: list[tuple[DemoRow, ...]]
) -> None:
    assert run("demo").code == 0
    for bad in (rows(served=0), rows(token=8)):
        replicas[0] = bad
        ran = run("demo", "--json")
        assert ran.code == 1
        assert not ran.document["fine"]


def test_the_command_says_how_to_look_at_what_it_stored(
    run: Run, home: Path, replicas: list[tuple[DemoRow, ...]]
) -> None:
    lines = run("demo").out.splitlines()
    store = f"{home}/objkv/demo/store"
    urls = ["--bulk-url", f"file://{store}/chunks", "--index-url", f"sqlite://{store}/index.sqlite"]
    ls, match = (shlex.split(line) for line in lines if "--bulk-url" in line)
    assert ls[1:] == ["ls", "--prefixes", *urls]
    assert (match[1:3], match[4:]) == (["match", "--tokens"], urls)
    assert json.loads(Path(match[3]).read_text()) == list(prompts_of("normal")[-1].tokens)
    assert not any("export" in line for line in lines), "nothing lingers in the user's shell"


def test_without_vllm_it_says_how_to_install_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "find_spec", lambda name: None)
    ran = run("demo")
    assert ran.code == 2
    assert "pip install 'objkv[vllm]'" in ran.err


def test_a_failed_replica_shows_the_end_of_its_log(
    run: Run, tmp_path: Path, replicas: list[tuple[DemoRow, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "replica.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))

    def fail(*_: object, **__: object) -> None:
        raise ProgramFailed("replica A ended with exit status 1", log)

    monkeypatch.setattr(demo_module, "live", fail)
    ran = run("demo")
    assert ran.code == 1
    assert f"replica A ended with exit status 1; its log is {log}" in ran.err
    assert ran.err.endswith("  line 98\n  line 99\n")
    assert "line 50\n" not in ran.err


def test_two_demos_do_not_share_a_place(tmp_path: Path) -> None:
    place = DemoFolder(tmp_path / "demo")
    with (
        place.prepared(PROMPTS),
        pytest.raises(ConfigError, match="another demo is running"),
        place.prepared(PROMPTS),
    ):
        pass
