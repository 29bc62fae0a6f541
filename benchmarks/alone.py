"""One benchmark's command line, with the options and the output of ``objkv bench``."""

import sys
from collections.abc import Callable

import typer

from objkv.cli.bench import BenchOptions, Check, Plot, Quick, Rounds, Work, run_works
from objkv.cli.command import Session, command


def run_alone(work: Work) -> None:
    """Be ``python -m benchmarks.NAME``: measure ``work`` and print what it found."""

    def measure(
        session: Session,
        rounds: Rounds = 7,
        quick: Quick = False,
        check: Check = False,
        plot: Plot = None,
    ) -> int:
        return run_works(session, (work,), BenchOptions(rounds, quick, check, plot))

    run_command(measure, sys.modules[work.__module__].__doc__)


def run_command(measure: Callable[..., int], text: str | None) -> None:
    """Run a command line whose only command is ``measure``; ``text`` is its help."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(help=text)(command(measure))
    app()
