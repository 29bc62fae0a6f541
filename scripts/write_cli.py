"""``docs/reference/cli.md``: commands, options and JSON keys from ``objkv/cli``, the other words
from ``cli_page.txt``."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, is_typeddict

from typer.core import TyperArgument, TyperOption

from objkv.cli.app import COMMANDS, all_commands
from objkv.cli.options import CommonOptions
from tests.support.documents import DOCUMENTS, Key, RunKeys, keys_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
WORDS = Path(__file__).with_name("cli_page.txt")
NUMBER = re.compile(r"<(?:int|integer|float)(?: range)?>")
COMMON = {field.name for field in fields(CommonOptions)}
KINDS = {
    int: "integer", float: "number", bool: "true or false", str: "text", bytes: "hash", Any: "any",
}  # fmt: skip
WIDTH = 115


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


def section(path: str, command: Any, words: str) -> Iterator[str]:
    """The lines about one command."""
    context = command.make_context(path.split()[-1], [], resilient_parsing=True)
    yield from (f"## {path}", "", *paragraphs(command.help))
    pieces = " ".join(command.collect_usage_pieces(context))
    yield from ("```", f"{path} {pieces}".rstrip(), "```", "")
    shared = {p.name for p in command.params} >= COMMON
    own = [
        p
        for p in command.params
        if isinstance(p, TyperArgument)
        or (isinstance(p, TyperOption) and not p.hidden and not (shared and p.name in COMMON))
    ]
    if own:
        yield from (*(parameter_item(one, context) for one in own), "")
    if words:
        yield from (words, "")
    for document in DOCUMENTS.get(path.removeprefix("objkv "), ()):
        given = f" with `{document.options}`" if document.options else ""
        what = "a list of these objects" if document.is_list else "these keys"
        parts = [part for part in document.parts if part is not RunKeys]
        run = " besides [those of long runs](#long-runs)" if RunKeys in document.parts else ""
        yield from (f"`--json`{given} prints {what}{run}:", "")
        yield from (*keys(keys_of(*parts), set()), "")


def keys(found: Mapping[str, Key], known: set[Any], level: int = 0) -> Iterator[str]:
    """One item for each key; keys in a row without a meaning of their own share an item."""
    each = [(name, key, kind_of(key), objects_in(key.type)) for name, key in found.items()]

    def together(row: tuple[str, Key, str, Any]) -> tuple[str, object]:
        name, key, kind, inner = row
        return kind, name if key.meaning or inner else ""

    for (kind, _), rows in groupby(each, together):
        group = list(rows)
        names = ", ".join(f"`{name}`" for name, *_ in group)
        _, key, _, inner = group[0]
        meaning = re.sub(r"\bNone\b", "null", plain(key.meaning))
        end = "" if not meaning or meaning.endswith((".", ":")) else "."
        is_new = inner is not None and inner not in known
        text = f"{names}: {kind}{f'. {meaning}{end}' if meaning else ''}"
        if inner is not None and not is_new:
            text = f"{text.removesuffix('.')}, as above."
        yield item(text, level)
        if is_new:
            known.add(inner)
            yield from keys(keys_of(*inner), known, level + 1)


def kind_of(key: Key) -> str:
    """A type in words."""
    return words_of(key.type) + ("" if key.is_required else ", not always present")


def words_of(kind: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated or is_dataclass(kind) or is_typeddict(kind):
        return "object"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join("null" if one is type(None) else words_of(one) for one in inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"object with names as keys: {words_of(inner[1])}"
    if origin is tuple and inner[-1] is not ...:
        return f"list: {', '.join(map(words_of, inner))}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"list of {words_of(inner[0])}".replace("list of object", "list of objects")
    return KINDS[kind]


def objects_in(kind: Any) -> tuple[Any, ...] | None:
    """The types whose keys an object of this type has; None if there is none."""
    if get_origin(kind) is Annotated:
        return get_args(kind)
    if is_dataclass(kind) or is_typeddict(kind):
        return (kind,)
    found = filter(None, (objects_in(one) for one in get_args(kind) if one is not ...))
    return next(found, None)


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
    lists = {
        "commands": listed,
        "common": [parameter_item(option, context) for option in common],
        "run keys": keys(keys_of(RunKeys), set()),
    }
    for name, items in lists.items():
        head = head.replace(f"<!-- {name} -->", "\n".join(items))
    sections = [
        "\n".join(section(path, command, written.get(path, "")))
        for path, command in known.items()
        if path != "objkv"
    ]
    return "\n".join([head, *sections]).replace("\n\n\n", "\n\n").rstrip() + "\n"
