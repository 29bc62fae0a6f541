"""All words that users read: settings, help, errors, metric help, docs and docstrings."""

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from objkv.cli.app import COMMANDS
from objkv.config import Config
from objkv.connector.counters import ENCODER_METRICS, KV_METRICS, TIER_METRICS
from objkv.ops.exporter.metrics import METRICS
from tests import words
from tests.test_docs import DOCUMENTS, name_of

ROOT = Path(__file__).parents[1]
SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z_])")
# A figure as it is measured: a ratio, a time, a rate, a size, an amount of money.
FIGURE = re.compile(r"\b\d[\d,.]*\s?(x\b|µs|ms\b|[GMK]i?B/s|% of|times\b)|\$\s?\d")
MADE_BY = re.compile(
    r"make ([a-z-]+)|objkv (\w+)"
    r"|(?:python -m |(?=benchmarks/))(benchmarks[./][\w./]+?(?:\.py)?)(?=[\s`|]|$)"
)
MEASURED = ("README.md", "docs/performance.md", "docs/scaling.md", "docs/comparison.md")


PAGES = [name_of(path) for path in DOCUMENTS]
MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "objkv").rglob("*.py"))
NAMES = {"Redis", "Valkey", "Python", "Sentinel", "Content"}
"""Words that are written with a capital letter everywhere."""


def settings() -> Iterator[tuple[str, str]]:
    for name, field in Config.model_fields.items():
        yield f"setting {name}", field.description or ""


def helps() -> Iterator[tuple[str, str]]:
    """The help of every command, argument and option."""
    for path, command in runpy.run_path(str(ROOT / "scripts/write_cli.py"))["commands"]():
        yield path, command.help or ""
        for parameter in command.params:
            if text := getattr(parameter, "help", None):
                yield f"{path} {parameter.name}", text


def metrics() -> Iterator[tuple[str, str]]:
    for table in (KV_METRICS, ENCODER_METRICS, TIER_METRICS):
        for kind in (table.counters, table.gauges, table.histograms):
            yield from ((f"metric {name}", text) for name, text in kind.items())
    yield from ((f"metric {name}", metric.text) for name, metric in METRICS.items())


def errors(module: str) -> Iterator[tuple[int, str]]:
    """The text of each exception that the module raises, with ``{}`` for a value."""
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = node.exc.args[0]
            if isinstance(message, ast.JoinedStr):
                yield node.lineno, "".join(map(_piece, message.values))
            elif isinstance(message, ast.Constant) and isinstance(message.value, str):
                yield node.lineno, message.value


def _piece(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def report(found: list[Any]) -> str:
    return "\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("kind", [settings, helps, metrics])
def test_settings_help_and_metrics_are_plain_sentences(kind: Any) -> None:
    texts = dict(kind())
    assert len(texts) > 20
    found = [f for place, text in texts.items() for f in words.in_text(text, place)]
    assert not found, report(found)
    unended = [p for p, text in texts.items() if not text.strip().endswith((".", ")", "`", ":"))]
    assert not unended, report(unended)


def test_the_help_of_a_command_begins_with_a_verb() -> None:
    texts = {name: sentence for name, (_, sentence) in COMMANDS.items()}
    firsts = {name: text.split()[0] for name, text in texts.items()}
    wrong = [f"{name}: {w}" for name, w in firsts.items() if w.lower() not in words.VERBS]
    assert not wrong, report(wrong)


@pytest.mark.parametrize("module", MODULES)
def test_errors_are_one_sentence_that_begins_small_and_has_no_full_stop(module: str) -> None:
    for line, text in errors(module):
        if len(text.split()) < 3:
            continue
        first = text.split()[0]
        assert not re.fullmatch(r"[A-Z][a-z]+", first) or first in NAMES, f"{module}:{line}: {text}"
        assert not re.search(r"[a-z)]\.$", text), f"{module}:{line}: {text}"


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_comments_and_messages_are_plain(module: str) -> None:
    found = list(words.in_python(ROOT / module, module))
    assert not found, report(found)


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_plain_and_their_lines_are_short(page: str) -> None:
    found = list(words.in_markdown(ROOT / page, page))
    assert not found, report(found)


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_a_verb(page: str) -> None:
    wrong = [
        f"{page}:{line}: {sentence}"
        for line, text in words.paragraphs((ROOT / page).read_text())
        for sentence in SENTENCES.split(text)
        if sentence.endswith(".")
        and len(sentence.split()) >= 4
        and not sentence.startswith("Source: ")
        and not words.has_verb(sentence)
    ]
    assert not wrong, report(wrong)


@pytest.mark.parametrize("page", MEASURED)
def test_each_section_with_figures_has_a_command_that_makes_them(page: str) -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known |= {place.removeprefix("objkv ").split()[0] for place, _ in helps()}
    sections = re.split(r"^(?=## )", (ROOT / page).read_text(), flags=re.MULTILINE)
    measured = [section for section in sections if FIGURE.search(words.prose(section))]
    assert measured
    for section in measured:
        # A page that is made by one command names it once, before its sections.
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", sections[0] + section, re.DOTALL))
        found = MADE_BY.findall(code)
        named = {program.removesuffix(".py") for _, _, program in found}
        programs = {name.replace(".", "/") for name in named if "/" not in name or "." not in name}
        programs -= {""}
        missing = [name for name in programs if not (ROOT / f"{name}.py").exists()]
        assert not missing, (section.splitlines()[0], missing)
        commands = {word for target, command, _ in found for word in (target, command)}
        assert programs or commands & known, section.splitlines()[0]


@pytest.mark.parametrize(
    "text",
    [
        "The server is told to stop.",
        "Of a namespace.",
        "Both ends answer.",
        "What is stored, and for whom.",
        "Whoever waits sleeps.",
        "The key is not there.",
        "It is left alone so long.",
        "Where the index is Redis, it waits.",
    ],
)
def test_the_checker_finds_stilted_words(text: str) -> None:
    assert list(words.in_text(text, "x"))


@pytest.mark.parametrize(
    "text",
    [
        "The server stops on SIGTERM.",
        "Of the 24 payloads, 3 are missing.",
        "What happens if Redis fails?",
        "The index and the store answer.",
        "It took as long as a put.",
    ],
)
def test_the_checker_passes_plain_words(text: str) -> None:
    assert not list(words.in_text(text, "x"))


def test_the_checker_sees_no_code_and_keeps_lines() -> None:
    text = "one\n```\nit is told\n```\n`he said`\n<!-- nobody -->\nthe last says\n"
    assert [finding.line for finding in words.in_text(words.prose(text), "x")] == [7]
    assert [line for line, _ in words.sentences('x = "a"\ny = "a b c"\n')] == [2]
    assert list(words.comments("x = 1  # one\n\n# two\n# three\n")) == [
        (1, "one"),
        (3, "two\nthree"),
    ]


def test_a_sentence_without_a_verb_is_found() -> None:
    assert words.has_verb("The reader stops.")
    assert words.has_verb("Copied by the worker.")
    assert not words.has_verb("All namespaces of one tenant.")
