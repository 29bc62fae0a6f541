"""The help of commands in ``docs/reference/cli.md``, from ``objkv/cli``."""

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperOption

from objkv.cli.app import COMMANDS, all_commands
from objkv.cli.options import CommonOptions

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
NUMBER = re.compile(r"<(?:int|integer|float)(?: range)?>")
COMMON = {field.name for field in fields(CommonOptions)}
WIDTH = 100


def plain(text: str | None) -> str:
    """Help as one line of Markdown."""
    pieces = " ".join((text or "").split()).replace("``", "`").split("`")
    return "`".join(p if i % 2 else p.replace("<", "&lt;") for i, p in enumerate(pieces))


def wrapped(text: str, first: str = "", other: str = "") -> str:
    """A paragraph or an item of a list."""
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=other,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def item(text: str) -> str:
    """One item of a list, wrapped."""
    return wrapped(text, "* ", "  ")


def parameter_item(parameter: Any, context: Any) -> str:
    """One option or argument: what one types, its meaning, default and bounds."""
    names, text = parameter.get_help_record(context) or (parameter.make_metavar(context), "")
    meaning, _, brackets = text.removesuffix("]").partition("[")
    names = re.sub(r"^([A-Z]\w*) <.*>$", r"\1", NUMBER.sub("N", names)).replace("<str>", "TEXT")
    parts = [plain(meaning).rstrip(". ") + "." if meaning.strip() else "", bounds(brackets)]
    return item(f"`{names}`: {' '.join(filter(None, parts))}".removesuffix(": "))


def bounds(brackets: str) -> str:
    """The default and the bounds of an option, as a sentence."""
    text = brackets.replace(str(Path.home()), "~")
    text = re.sub(r"default: (.*?)(?=; |$)", r"default `\1`", text).replace("; ", ", ")
    text = re.sub(r"([^ ,]+)<=x<=([^ ,]+)", r"\1 to \2", text)
    text = plain(text.replace("x>=", "at least ").replace("x<=", "at most "))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def own_items(path: str, command: Any) -> dict[str, str]:
    """A command's arguments and options, without the common ones, by their names."""
    context = command.make_context(path.split()[-1], [], resilient_parsing=True)
    return {
        p.opts[0]: parameter_item(p, context)
        for p in command.params
        if isinstance(p, TyperArgument)
        or (isinstance(p, TyperOption) and not p.hidden and p.name not in COMMON)
    }


def section(command: Any, items: dict[str, str], shared: list[str]) -> Iterator[str]:
    """The lines about one command. ``shared``: items of options that are listed elsewhere."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        yield from (wrapped(plain(paragraph.replace("\b", ""))), "")
    if own := [text for text in items.values() if text not in shared]:
        yield from (*own, "")
    if also := [f"`{name}`" for name, text in items.items() if text in shared]:
        yield wrapped(f"[As elsewhere](#options-of-several-commands): {', '.join(also)}.")


def blocks() -> dict[str, str]:
    """The lists of commands and of options, and the help of each command."""
    known = {path: command for path, command in sorted(all_commands()) if path != "objkv"}
    items = {path: own_items(path, command) for path, command in known.items()}
    uses = Counter(text for own in items.values() for text in own.values())
    shared = [text for text, count in uses.items() if count > 1]
    ls = known["objkv ls"]
    context = ls.make_context("ls", [], resilient_parsing=True)
    lists = {
        "commands": [
            item(f"[`{name}`](#objkv-{name}): {plain(sentence)}")
            for name, (_, sentence) in COMMANDS.items()
        ],
        "common options": [parameter_item(p, context) for p in ls.params if p.name in COMMON],
        "shared options": shared,
    }
    lists |= {path: [*section(one, items[path], shared)] for path, one in known.items()}
    return {name: "\n".join(lines) for name, lines in lists.items()}
