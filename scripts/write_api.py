"""The calls, results and errors in ``docs/reference/api.md``, from docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import objkv
from scripts.write_cli import WIDTH, item, plain, wrapped

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
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
            listed = textwrap.dedent(paragraph.removeprefix("Args:\n"))
            for one in re.split(r"\n(?=\w+: )", listed):
                name, _, meaning = one.partition(": ")
                yield item(f"`{name}`: {plain(meaning)}")
            yield ""
        else:
            yield from (wrapped(plain(paragraph)), "")


def shown(kind: Any) -> str:
    """A type as programs write it."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"\b(?:objkv|collections|typing|os)(?:\.\w+)*\.(\w+)", r"\1", text).strip("'\"")
    prompt = "str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]"
    return text.replace(prompt, "Prompt")


def section(head: str, name: str, function: Callable[..., Any]) -> Iterator[str]:
    """A call, in one line or with an argument a line, and what it does."""
    found = inspect.signature(function)
    words: list[str] = []
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        mark = "**" if one.kind is one.VAR_KEYWORD else ""
        value = "..." if callable(one.default) else repr(one.default)
        default = "" if one.default is one.empty else f" = {value}"
        words.append(f"{mark}{one.name}: {shown(one.annotation)}{default}")
    if found.parameters.keys() & {"self"}:
        words.pop(0)
    returns = shown(found.return_annotation)
    call = name.removeprefix("Client.")
    line = f"{call}({', '.join(words)}) -> {returns}"
    if len(line) > WIDTH:
        line = f"{call}(\n" + "".join(f"    {word},\n" for word in words) + f") -> {returns}"
    yield from (f"{head} {name}", "", "```python", line, "```", "", *described(function.__doc__))


def meanings(kind: type) -> dict[str, str]:
    """The text below each field of a class."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for line, after in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                found[line.target.id] = str(after.value.value) if has_text else ""
    return found


def calls() -> Iterator[str]:
    """``open``, and the client with its methods."""
    yield from section("##", "objkv.open", objkv.open)
    yield from ("## Client", "", *described(objkv.Client.__doc__))
    for name, member in vars(objkv.Client).items():
        if not name.startswith("_") and inspect.isfunction(member):
            yield from section("###", f"Client.{name}", member)


def results() -> Iterator[str]:
    """Each result with its fields and properties."""
    for name in RESULTS:
        kind = getattr(objkv, name)
        yield from (f"### {name}", "", *described(kind.__doc__))
        if name in SEE:
            yield from (SEE[name], "")
        texts = meanings(kind)
        rows = [(field.name, field.type, texts[field.name]) for field in fields(kind)]
        for prop, member in vars(kind).items():
            if isinstance(member, property) and not prop.startswith("_"):
                returns = inspect.signature(member.fget).return_annotation
                rows.append((prop, returns, str(member.__doc__)))
        for field_name, type_, meaning in rows:
            text = f"`{field_name}`: `{shown(type_)}`. {plain(meaning)}".rstrip().removesuffix(".")
            yield item(f"{text}.")
        yield ""


def errors() -> Iterator[str]:
    """Each error, and of which kind it is."""
    for name in ERRORS:
        kind = getattr(objkv, name)
        base = kind.__bases__[0].__name__
        inherits = "" if base == "Exception" else f" A `{base}`."
        yield item(f"`objkv.{name}`: {plain(kind.__doc__)}{inherits}")


def blocks() -> dict[str, str]:
    """What is generated of the page."""
    assert {"open", "Client", *RESULTS, *ERRORS, "__version__"} == set(objkv.__all__)
    lists = {"calls": calls(), "results": results(), "errors": errors()}
    return {name: "\n".join(lines).replace("\n\n\n", "\n\n") for name, lines in lists.items()}
