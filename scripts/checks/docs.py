"""What the documents name exists: the targets of links, files and tests, commands with their
options, settings, targets of make, metrics, and what may be imported."""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from objkv.cli.app import all_commands
from objkv.config import Config
from scripts.checks import ROOT, line_of, name_of, tracked

LINK = re.compile(r"\[[^\]]*\]\((?!\w+:)([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^[` ]*(?:\$ )?objkv ([a-z]+(?:-[a-z]+)?\b)([^|#;`()\n]*)", re.M)
FILE = re.compile(
    r"^`((?:tests|scripts|docs|objkv|benchmarks|examples|terraform)/[\w./-]+\.\w+)(?:::(\w+))?`$"
)
NAMES = {
    "setting": re.compile(r"\b(OBJKV_[A-Z0-9_]*[A-Z0-9])\b"),
    "metric": re.compile(r"`((?:vllm:)?objkv_[a-z_]*[a-z])[`{]"),
    "target of make": re.compile(r"^[` ]*(?:\$ )?make ([a-z-]+)\b(?!=)", re.MULTILINE),
}
PACKAGE_FILE = re.compile(r"(?<![\w/])[a-z]+/[\w/]+\.py\b")
PACKAGE_CLASS = re.compile(r"(?<!\w)((?:[A-Z][a-z0-9]+){2,})\b")
CLASS = re.compile(r"^(?:class )?([A-Z]\w+)", re.MULTILINE)
IMPORTED = re.compile(r"^\| `(objkv(?:\.\w+)*)\.(\w+)` \|", re.MULTILINE)
LOGGED = {"ready", "identity"}
"""Lines of a replica's log begin like a command."""


def known() -> dict[str, set[str]]:
    """All names of each kind."""
    makefile = (ROOT / "Makefile").read_text()
    metrics = set(NAMES["metric"].findall((ROOT / "docs/metrics.md").read_text()))
    metrics.add("objkv_put")  # a parameter of requests
    return {
        "setting": {f"OBJKV_{n.upper()}" for n in Config.model_fields} | {"OBJKV_CONFIG_FILE"},
        "metric": metrics | {name.removesuffix("_total") for name in metrics},
        "target of make": set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)),
    }


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that code hosts make of headings."""
    text = re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}


@cache
def commands() -> dict[str, set[str]]:
    """The options of every command."""
    return {
        path.removeprefix("objkv").strip(): {"--help"}.union(
            *((*one.opts, *one.secondary_opts) for one in command.params)
        )
        for path, command in all_commands()
    }


def findings() -> Iterator[str]:
    """Each name of something that does not exist."""
    names = known()
    for path in tracked("*.md"):
        text = path.read_text()
        pieces = [(one.start(), one[0].replace("\\\n", "  ")) for one in CODE.finditer(text)]
        found = list(links(path, CODE.sub(lambda one: re.sub(r"[^\n]", " ", one[0]), text)))
        if path.name != "CHANGELOG.md":  # It may name what is gone.
            for start, code in pieces:
                found += [(start + at, what) for at, what in in_code(code, names)]
        if path.name == "architecture.md":
            found += in_package(text)
        if path.name == "upgrade.md":
            found += [(one.start(), gone(*one.groups())) for one in IMPORTED.finditer(text)]
        yield from (f"{name_of(path)}:{line_of(text, at)}: {w}" for at, w in sorted(found) if w)


def links(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Each link that leads nowhere."""
    for link in LINK.finditer(text):
        name, _, anchor = link[1].partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link.start(), f"the link leads nowhere: {link[1]}"


def in_package(text: str) -> Iterator[tuple[int, str]]:
    """Each file and class of the package that does not exist."""
    package, contracts = ROOT / "objkv", ROOT / "tests" / "contracts"
    for file in PACKAGE_FILE.finditer(text):
        if not (package / file[0]).exists() and not (ROOT / file[0]).exists():
            yield file.start(), f"no such file: {file[0]}"
    code = [*package.rglob("*.py"), *contracts.glob("*.py")]
    classes = {found for path in code for found in CLASS.findall(path.read_text())}
    for name in PACKAGE_CLASS.finditer(text):
        if name[1] not in classes:
            yield name.start(), f"no such class: {name[1]}"


def in_code(code: str, names: dict[str, set[str]]) -> Iterator[tuple[int, str]]:
    """Each file, name, command and option in a piece of code that does not exist."""
    for kind, pattern in NAMES.items():
        for name in pattern.finditer(code):
            if name[1] not in names[kind]:
                yield name.start(), f"no such {kind}: {name[1]}"
    for name in FILE.finditer(code):
        file = ROOT / name[1]
        if not file.exists() or (name[2] and f"def {name[2]}(" not in file.read_text()):
            yield 0, f"no such file or test: {name[0]}"
    for typed in COMMAND.finditer(code):
        options = commands().get(typed[1])
        if options is None and typed[1] not in LOGGED:
            yield typed.start(), f"no such command: objkv {typed[1]}"
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", typed[2]):
            if options is not None and option not in options:
                yield typed.start(), f"no such option: objkv {typed[1]} {option}"


def gone(module: str, name: str) -> str:
    """What is wrong with a name that users may import."""
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return f"{module}.{name} cannot be imported"
    return ""
