"""Every log line is an event in lower case, then ``key=value``, formatted only if it is shown."""

import ast
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "objkv"
MODULES = sorted(ROOT.rglob("*.py"))
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
SILENT = ("stores", "index", "codec", "keys", "config", "resp")
"""Floors whose numbers go to a recorder, and whose errors to whoever called."""
PLACEHOLDER = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdrfgx]")
VALUE = re.compile(r"(?:^|[ ])([a-z][a-z0-9_]*)=(%[^ ]*)")
LOUD = {"stores/local.py"}
"""It leaves out what it may not read and goes on: no error says so, and only a person can act."""
NAMES = ("vLLM", "KV", "S3", "Redis")
"""Words that are written so wherever they stand."""


@dataclass(frozen=True)
class Line:
    """One call of a logger."""

    place: str
    level: str
    call: ast.Call

    def texts(self) -> list[str]:
        """The formats that it may have; empty if they are not there before it is called."""
        return list(constants(self.call.args[0])) if self.call.args else []


def constants(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from constants(node.body)
        yield from constants(node.orelse)


def is_logger(node: ast.expr) -> bool:
    name = (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
    return name.strip("_") in ("logger", "log", "logging")


def lines_of(source: str, name: str) -> list[Line]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in LEVELS and is_logger(node.func.value):
            found.append(Line(f"{name}:{node.lineno}", node.func.attr, node))
    return found


LINES = [
    line for path in MODULES for line in lines_of(path.read_text(), str(path.relative_to(ROOT)))
]


def faults(line: Line) -> list[str]:
    """What is wrong with it."""
    texts = line.texts()
    if not texts:
        return ["not a constant format: values are arguments, so that nothing is formatted unseen"]
    found = []
    for text in texts:
        placeholders = PLACEHOLDER.findall(text.replace("%%", ""))
        if len(placeholders) != len(line.call.args) - 1:
            found.append(f"{len(placeholders)} placeholders for {len(line.call.args) - 1} values")
        event = re.split(r" [a-z][a-z0-9_]*=", text, maxsplit=1)[0]
        first = event.split(" ")[0].rstrip(",:")
        if first[:1] in string.ascii_uppercase and first not in NAMES:
            found.append("an event begins in lower case")
        if text.endswith((".", "!", ":", " ")) or "\n" in text:
            found.append("an event has no full stop, and is one line")
        named = sum(len(PLACEHOLDER.findall(value)) for _, value in VALUE.findall(text))
        subject = 1 if text.startswith("%s") else 0  # what it happened to may begin the sentence
        if named + subject != len(placeholders):
            found.append("values stand as key=value behind the event")
    return found


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.place)
def test_a_line_is_an_event_and_its_values(line: Line) -> None:
    assert faults(line) == []


def test_all_loggers_are_found() -> None:
    text = "".join(path.read_text() for path in MODULES)
    assert len(LINES) == len(re.findall(rf"\b_?log(?:ger|ging)?\.(?:{'|'.join(LEVELS)})\(", text))
    assert len(LINES) > 50


@pytest.mark.parametrize(
    "call",
    [
        'logger.info(f"saved {count}")',
        'logger.info("saved %d" % count)',
        'logger.info("saved {}".format(count))',
        'logger.info("Saved chunks=%d", count)',
        'logger.info("saved chunks %d", count)',
        'logger.info("saved chunks=%d.", count)',
        'logger.info("saved chunks=%d of=%d", count)',
        'self._logger.warning("saved: %s chunks=%d", what, count)',
    ],
)
def test_a_line_of_another_style_is_found(call: str) -> None:
    (line,) = lines_of(call, "made-up")
    assert faults(line)


@pytest.mark.parametrize("floor", SILENT)
def test_what_is_pure_does_not_log(floor: str) -> None:
    for path in (ROOT / floor).rglob("*.py"):
        if str(path.relative_to(ROOT)) in LOUD:
            continue
        assert not re.search(r"^(import|from) logging\b", path.read_text(), re.MULTILINE), path
