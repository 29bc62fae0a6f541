"""Whether a command line is one of objkv's: it is parsed, and not run."""

from collections.abc import Sequence

import typer.main

from objkv.cli.app import app


def parsed(arguments: Sequence[str]) -> str:
    """The command's name. Raises what click raises for options and values that it has not."""
    group = typer.main.get_command(app)
    with group.make_context("objkv", list(arguments)) as outer:
        name, command, rest = group.resolve_command(outer, outer._protected_args + outer.args)  # type: ignore[attr-defined]
        with command.make_context(name, rest, parent=outer):
            return str(name)
