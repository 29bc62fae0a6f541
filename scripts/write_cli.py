"""Writes ``docs/reference/cli.md`` from the command line itself, so that it cannot drift.

python scripts/write_cli.py; ``tests/test_docs.py`` fails when the page is stale.
"""

import inspect
import re
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperOption

from objkv.cli.app import all_commands
from objkv.cli.command import CommonOptions

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
HEAD = """# Options of every command

<!-- Written by scripts/write_cli.py from objkv/cli: change it there. -->

Every command of `objkv`, with its options and their defaults. What each prints, and the keys of its
`--json`, is in [the objkv command](../cli.md). `objkv COMMAND --help` says the same in a terminal.

Exit codes: 0 fine, 1 the check found something, 2 wrong usage or settings, 3 a store cannot be
reached.
"""
NUMBER = re.compile(r"<(?:int|integer|float)(?: range)?>")
COMMON = {field.name for field in fields(CommonOptions)}


def words(text: str | None) -> str:
    """Help as one line of Markdown."""
    line = " ".join((text or "").split())
    return line.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def row(parameter: Any, context: Any) -> str:
    """One row of a table: what one types, what it means, its default and its bounds."""
    names, told = parameter.get_help_record(context) or (parameter.make_metavar(context), "")
    meaning, _, brackets = told.removesuffix("]").partition("[")
    names = re.sub(r"^([A-Z]\w*) <.*>$", r"\1", NUMBER.sub("N", names)).replace("<str>", "TEXT")
    typed = escape(names).replace("|", "&#124;")  # A bar would end the cell.
    return f"| <code>{typed}</code> | {words(meaning)} | {bounds(brackets)} |"


def bounds(brackets: str) -> str:
    """What typer says in brackets, as a sentence would."""
    found = []
    for piece in filter(None, brackets.split("; ")):
        if piece.startswith("default: "):
            value = piece.removeprefix("default: ").replace(str(Path.home()), "~")
            found.append(f"`{value}`")
        elif both := re.fullmatch(r"(.+)<=x<=(.+)", piece):
            found.append(f"{both[1]} to {both[2]}")
        else:
            found.append(piece.replace("x>=", "at least ").replace("x<=", "at most "))
    return words(", ".join(found))


def section(path: str, command: typer.core.TyperCommand) -> str:
    """What the page says of one command."""
    context = command.make_context(path.split()[-1], [], resilient_parsing=True)
    lines = [f"## {path}", "", *paragraphs(command.help)]
    pieces = " ".join(piece for piece in command.collect_usage_pieces(context))
    lines += ["```", f"{path} {pieces}".rstrip(), "```", ""]
    arguments = [p for p in command.params if isinstance(p, TyperArgument)]
    if arguments:
        lines += ["| Argument | | |", "|---|---|---|"]
        lines += [*(row(argument, context) for argument in arguments), ""]
    shared = {p.name for p in command.params} >= COMMON and path != "objkv"
    own = [
        p
        for p in command.params
        if isinstance(p, TyperOption) and not p.hidden and not (shared and p.name in COMMON)
    ]
    if own:
        lines += ["| Option | | Default |", "|---|---|---|"]
        lines += [*(row(option, context) for option in own), ""]
    if shared:
        lines += ["And [the options that all have](#options-that-all-have).", ""]
    return "\n".join(lines)


def paragraphs(text: str | None) -> list[str]:
    """Help as paragraphs, each followed by an empty line."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        found += [words(paragraph.replace("\b", "")), ""]
    return found


def page() -> str:
    """The whole page."""
    known = dict(sorted(all_commands()))
    context = known["objkv ls"].make_context("ls", [], resilient_parsing=True)
    common = [p for p in known["objkv ls"].params if p.name in COMMON]
    shared = ["## Options that all have", "", "| Option | | Default |", "|---|---|---|"]
    shared += [row(option, context) for option in common]
    sections = [section(path, command) for path, command in known.items()]
    return "\n".join([HEAD, *shared, "", *sections]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
