"""The calls, results and errors in ``docs/reference/api.md``, from docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import objkv
from scripts.write_cli import WIDTH, item, plain, wrapped

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
FUNCTIONS = ("open",)
CLASSES = ("Client",)
RESULTS = ("Namespace", "Match", "Chunk", "PinnedPrefix", "AuditReport", "WarmReport")
ERRORS = (
    "ObjkvError", "ConfigError", "UnclearName", "NotStored", "StoreError", "StoreUnavailable",
    "StoreDenied", "PayloadError",
)  # fmt: skip
SEE = {
    "AuditReport": "[The audit](../audit.md) describes it.",
    "WarmReport": "[Warming](../warm.md) describes it.",
}


def described(text: str | None) -> Iterator[str]:
    """A docstring as paragraphs and a list of its arguments."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        if paragraph.startswith("Args:"):
            items = re.split(r"\n(?=\w+: )", textwrap.dedent(paragraph.removeprefix("Args:\n")))
            for one in items:
                name, _, meaning = one.partition(": ")
                yield item(f"`{name}`: {plain(meaning)}")
            yield ""
        else:
            yield from (wrapped(plain(paragraph)), "")


def shown(kind: Any) -> str:
    """A type as programs write it."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    for prompt in ("str | collections.abc.Sequence[int] | collections.abc.Sequence["
                   "collections.abc.Mapping[str, typing.Any]] | collections.abc.Mapping["
                   "str, typing.Any]",):  # fmt: skip
        text = text.replace(prompt, "Prompt")
    return re.sub(r"\b(?:objkv|collections|typing|os)(?:\.\w+)*\.(\w+)", r"\1", text).strip("'\"")


def signature(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """The call, in one line or with an argument a line."""
    found = inspect.signature(function)
    words, star = [], False
    for one in found.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            words, star = [*words, "*"], True
        mark = "**" if one.kind is one.VAR_KEYWORD else ""
        default = "" if one.default is one.empty else f" = {_value(one.default)}"
        words.append(f"{mark}{one.name}: {shown(one.annotation)}{default}")
    returns = shown(found.return_annotation)
    line = f"{name}({', '.join(words)}) -> {returns}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f") -> {returns}"
    yield from ("```python", line, "```", "")


def _value(default: object) -> str:
    return "..." if callable(default) else repr(default)


@cache
def meanings(kind: type) -> dict[str, str]:
    """The text below each field of a class."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, after in zip(body.body, [*body.body[1:], None], strict=True):
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            found[line.target.id] = str(after.value.value) if has_text else ""
    return found


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of the source."""
    for name, member in vars(kind).items():
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            yield name, member


def function_section(name: str) -> Iterator[str]:
    """A function of the package."""
    function = getattr(objkv, name)
    yield from (f"## objkv.{name}", "", *signature(f"objkv.{name}", function))
    yield from described(function.__doc__)


def error_item(name: str) -> str:
    """An error, and of which kind it is."""
    kind = getattr(objkv, name)
    base = kind.__bases__[0].__name__
    inherits = "" if base == "Exception" else f" A `{base}`."
    return item(f"`objkv.{name}`: {plain(kind.__doc__)}{inherits}")


def class_section(name: str) -> Iterator[str]:
    """A class with its methods."""
    kind = getattr(objkv, name)
    yield from (f"## {name}", "", *described(kind.__doc__))
    for method, member in members(kind):
        yield from (f"### {name}.{method}", "", *signature(method, member))
        yield from described(member.__doc__)


def result_section(name: str) -> Iterator[str]:
    """A result with its fields and properties."""
    kind = getattr(objkv, name)
    assert is_dataclass(kind)
    yield from (f"### {name}", "", *described(kind.__doc__))
    if name in SEE:
        yield from (SEE[name], "")
    rows = [(field.name, shown(field.type), meanings(kind)[field.name]) for field in fields(kind)]
    for prop, member in members(kind):
        if isinstance(member, property):
            rows.append((prop, shown(inspect.signature(member.fget).return_annotation),
                         str(member.__doc__)))  # fmt: skip
    for field_name, type_name, meaning in rows:
        text = f"`{field_name}`: `{type_name}`. {plain(meaning)}".rstrip().removesuffix(".")
        yield item(f"{text}.")
    yield ""


def blocks() -> dict[str, str]:
    """What is generated of the page."""
    assert {*FUNCTIONS, *CLASSES, *RESULTS, *ERRORS, "__version__"} == set(objkv.__all__)
    calls = [*chain.from_iterable(map(function_section, FUNCTIONS))]
    calls += chain.from_iterable(map(class_section, CLASSES))
    results = chain.from_iterable(map(result_section, RESULTS))
    lists = {"calls": calls, "results": results, "errors": map(error_item, ERRORS)}
    return {name: "\n".join(lines).replace("\n\n\n", "\n\n") for name, lines in lists.items()}
