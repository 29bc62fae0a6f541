"""The help of commands in ``docs/reference/cli.md``, from ``objkv/cli``."""

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
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


def commands() -> list[tuple[str, Any]]:
    """All commands by name, groups before their subcommands."""
    return sorted(all_commands())


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
    limits = bounds(brackets)
    parts = [plain(meaning).rstrip(". ") + "." if meaning.strip() else "", limits]
    return item(f"`{names}`: {' '.join(filter(None, parts))}".removesuffix(": "))


def bounds(brackets: str) -> str:
    """The default and the bounds of an option, as a sentence."""
    found = []
    for piece in filter(None, brackets.split("; ")):
        if piece.startswith("default: "):
            value = piece.removeprefix("default: ").replace(str(Path.home()), "~")
            found.append(f"default `{value}`")
        elif both := re.fullmatch(r"(.+)<=x<=(.+)", piece):
            found.append(f"{both[1]} to {both[2]}")
        else:
            found.append(piece.replace("x>=", "at least ").replace("x<=", "at most "))
    text = plain(", ".join(found))
    return f"{text[0].upper()}{text[1:]}." if text else ""


def own_options(command: Any) -> list[Any]:
    """A command's arguments and options, without the common ones."""
    return [
        p
        for p in command.params
        if isinstance(p, TyperArgument)
        or (isinstance(p, TyperOption) and not p.hidden and p.name not in COMMON)
    ]


def section(path: str, command: Any, shared: Collection[str]) -> Iterator[str]:
    """The lines about one command. ``shared``: items of options that are listed elsewhere."""
    context = command.make_context(path.split()[-1], [], resilient_parsing=True)
    yield from paragraphs(command.help)
    items = {one.opts[0]: parameter_item(one, context) for one in own_options(command)}
    own = [text for text in items.values() if text not in shared]
    if own:
        yield from (*own, "")
    if also := [f"`{name}`" for name, text in items.items() if text in shared]:
        yield wrapped(f"[As elsewhere](#options-of-several-commands): {', '.join(also)}.")


def shared_items(commands: Mapping[str, Any]) -> list[str]:
    """The items of options that several commands have."""
    found = Counter[str]()
    for path, command in commands.items():
        context = command.make_context(path.split()[-1], [], resilient_parsing=True)
        found.update(parameter_item(one, context) for one in own_options(command))
    return [text for text, count in found.items() if count > 1]


def paragraphs(text: str | None) -> list[str]:
    """Help as paragraphs, each followed by an empty line."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        found += [wrapped(plain(paragraph.replace("\b", ""))), ""]
    return found


def blocks() -> dict[str, str]:
    """The lists of commands and of options, and the help of each command."""
    known = {path: command for path, command in commands() if path != "objkv"}
    context = known["objkv ls"].make_context("ls", [], resilient_parsing=True)
    common = [p for p in known["objkv ls"].params if p.name in COMMON]
    listed = [
        item(f"[`{name}`](#objkv-{name}): {plain(sentence)}")
        for name, (_, sentence) in COMMANDS.items()
    ]
    shared = shared_items(known)
    lists = {
        "commands": listed,
        "common options": [parameter_item(option, context) for option in common],
        "shared options": shared,
    }
    lists |= {path: [*section(path, command, shared)] for path, command in known.items()}
    return {name: "\n".join(lines) for name, lines in lists.items()}
