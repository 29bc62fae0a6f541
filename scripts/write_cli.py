"""``docs/reference/cli.md``: commands and options from ``objkv/cli``, the other words from
``cli_page.txt``."""

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
WORDS = Path(__file__).with_name("cli_page.txt")
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


def item(text: str, level: int = 0) -> str:
    """One item of a list, wrapped."""
    indent = "    " * level
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"{indent}* ",
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


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


def section(path: str, command: Any, words: str, shared: Collection[str]) -> Iterator[str]:
    """The lines about one command. ``shared``: items of options that are listed elsewhere."""
    context = command.make_context(path.split()[-1], [], resilient_parsing=True)
    yield from (f"## {path}", "", *paragraphs(command.help))
    items = {one.opts[0]: parameter_item(one, context) for one in own_options(command)}
    own = [text for text in items.values() if text not in shared]
    if own:
        yield from (*own, "")
    if also := [f"`{name}`" for name, text in items.items() if text in shared]:
        yield from (f"[As elsewhere](#options-of-several-commands): {', '.join(also)}.", "")
    if words:
        yield from (words, "")


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
        found += [plain(paragraph.replace("\b", "")), ""]
    return found


def page() -> str:
    """The whole page."""
    known = dict(commands())
    head, *rest = re.split(r"<!-- section: (.+) -->\n", WORDS.read_text())
    written = {path: text.strip() for path, text in zip(rest[::2], rest[1::2], strict=True)}
    assert written.keys() <= known.keys(), written.keys() - known.keys()
    context = known["objkv ls"].make_context("ls", [], resilient_parsing=True)
    common = [p for p in known["objkv ls"].params if p.name in COMMON]
    listed = [
        item(f"[`{name}`](#objkv-{name}): {plain(sentence)}")
        for name, (_, sentence) in COMMANDS.items()
    ]
    commands_only = {path: command for path, command in known.items() if path != "objkv"}
    shared = shared_items(commands_only)
    lists = {
        "commands": listed,
        "common": [parameter_item(option, context) for option in common],
        "shared": shared,
    }
    for name, items in lists.items():
        head = head.replace(f"<!-- {name} -->", "\n".join(items))
    sections = [
        "\n".join(section(path, command, written.get(path, ""), shared))
        for path, command in commands_only.items()
    ]
    return "\n".join([head, *sections]).replace("\n\n\n", "\n\n").rstrip() + "\n"
