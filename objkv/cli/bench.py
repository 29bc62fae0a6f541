"""``objkv bench``: what objkv reaches of what this machine allows."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from objkv.assembly.backends import open_bulk, open_hot, open_index
from objkv.cli.bench_output import bench_document, check_plot, plot_report, print_report
from objkv.cli.command import FINE, FOUND, Session, command
from objkv.cli.demo_output import Steps, print_failure
from objkv.cli.endings import ending_in_order
from objkv.config import cache_folder
from objkv.errors import ConfigError
from objkv.ops.bench.codec import bench_codec, bench_payload_codec
from objkv.ops.bench.configured import bench_configured
from objkv.ops.bench.engine import bench_engine
from objkv.ops.bench.far import bench_far
from objkv.ops.bench.gpu import bench_gpu
from objkv.ops.bench.lookup import bench_lookup
from objkv.ops.bench.machine import describe_machine
from objkv.ops.bench.rows import BenchReport, Section
from objkv.ops.bench.setting import Factories, Setting
from objkv.ops.bench.store import bench_store
from objkv.ops.demo.process import ProgramFailed
from objkv.telemetry import NullRecorder

Rounds = Annotated[
    int, typer.Option(min=1, max=1000, help="Rounds; each measures every side once, in turn.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes: whether it works, not how fast.")
]
Check = Annotated[bool, typer.Option("--check", help="Exit 1 if a row misses its target.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw the ratios, as .png or .svg.", metavar="FILE")
]
Work = Callable[[Setting], Section]

bench = typer.Typer(
    name="bench",
    help="Measure objkv against what is possible on this machine.",
    no_args_is_help=True,
)


@command
def store(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
    configured: Annotated[
        bool, typer.Option("--configured", help="Measure the stores of the settings instead.")
    ] = False,
    far: Annotated[
        bool, typer.Option("--far", help="Measure a bucket that is 25 ms and 10 Gbit/s away.")
    ] = False,
) -> int:
    """Payloads in and out of stores, against plain sockets and memcpy.

    Starts an S3 server and a Redis of its own; everything that is got is verified.
    """
    if configured and far:
        raise ConfigError("--configured and --far measure two different stores: choose one")
    own: Work = bench_far if far else bench_store
    if configured:
        config = session.config

        def own(setting: Setting) -> Section:
            return bench_configured(setting, config)

    return _run(session, (own,), _Options(rounds, quick, check, plot))


@command
def lookup(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """Learning what is stored of a prompt, against a round trip."""
    return _run(session, (bench_lookup,), _Options(rounds, quick, check, plot))


@command
def codec(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
    file: Annotated[
        Path | None, typer.Option(help="A payload of yours, instead of made-up KV.", metavar="FILE")
    ] = None,
) -> int:
    """Encoding and decoding on one core, against memcpy."""
    work: Work = bench_codec
    if file is not None:
        payload = file

        def work(setting: Setting) -> Section:
            return bench_payload_codec(setting, payload)

    return _run(session, (work,), _Options(rounds, quick, check, plot))


@command
def engine(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """vLLM with objkv against vLLM alone. Needs vLLM, but no GPU; takes minutes."""
    return _run(session, (bench_engine,), _Options(rounds, quick, check, plot))


@command
def gpu(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """Between host and paged cache, against a pinned copy. Says so where there is no GPU."""
    return _run(session, (bench_gpu,), _Options(rounds, quick, check, plot))


@command
def everything(
    session: Session,
    rounds: Rounds = 7,
    quick: Quick = False,
    check: Check = False,
    plot: Plot = None,
) -> int:
    """All of them, as one report.

    What cannot be measured here is skipped with a note.
    """
    works = (bench_store, bench_far, bench_lookup, bench_codec, bench_engine, bench_gpu)
    possible = tuple(_if_possible(work) for work in works)
    return _run(session, possible, _Options(rounds, quick, check, plot))


for _name, _command in (
    ("store", store),
    ("lookup", lookup),
    ("codec", codec),
    ("engine", engine),
    ("gpu", gpu),
    ("all", everything),
):
    bench.command(_name)(_command)


def _if_possible(work: Work) -> Work:
    """``work``, but what is missing for it becomes a note."""

    def possible(setting: Setting) -> Section:
        try:
            return work(setting)
        except ConfigError as exc:
            name = work.__name__.removeprefix("bench_")
            return Section(name, (), {}, (str(exc),), skipped=True)

    return possible


@dataclass(frozen=True, slots=True)
class _Options:
    rounds: int
    quick: bool
    check: bool
    plot: Path | None


def _run(session: Session, works: tuple[Work, ...], options: _Options) -> int:
    if options.plot is not None:
        check_plot(options.plot)
    machine = describe_machine()
    sections = _measure(works, options, Steps(color=session.out.color))
    if sections is None:
        return FOUND
    report = BenchReport(
        objkv=metadata.version("objkv"),
        machine=machine,
        rounds=options.rounds,
        quick=options.quick,
        sections=sections,
    )
    if session.out.machine:
        session.out.document(bench_document(report))
    else:
        print_report(session.out, report)
    if options.plot is not None:
        plot_report(options.plot, report)
    return FOUND if options.check and report.missed else FINE


def _measure(
    works: tuple[Work, ...], options: _Options, steps: Steps
) -> tuple[Section, ...] | None:
    """What they found, or None if a program failed, which is told."""
    sections = []
    with ending_in_order(), tempfile.TemporaryDirectory(prefix="objkv-bench-") as name:
        try:
            with steps.shown():
                for number, work in enumerate(works):
                    folder = Path(name) / str(number)
                    folder.mkdir()
                    sections.append(work(_setting(folder, options, steps)))
        except ProgramFailed as exc:
            # The log is gone with the folder: what it ends with is shown here.
            sys.stderr.write(f"objkv: {exc.what}, and its log ends:\n")
            print_failure(exc.tail())
            return None
    return tuple(sections)


def _setting(folder: Path, options: _Options, steps: Steps) -> Setting:
    recorder = NullRecorder()
    return Setting(
        rounds=options.rounds,
        quick=options.quick,
        folder=folder,
        factories=Factories(
            open_bulk=lambda config: open_bulk(config, recorder),
            open_hot=lambda config: open_hot(config, recorder),
            open_index=lambda config: open_index(config, recorder),
        ),
        tell=steps.tell,
        models=cache_folder() / "demo" / "models",
    )
