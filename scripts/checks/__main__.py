"""Check the repository: ``python -m scripts.checks [NAME ...]``, all checks without a name."""

import doctest
import re
import sys
import time
from collections.abc import Iterator
from importlib import import_module

from objkv.ops.doctor.settings import VERSION_END, VERSION_MIN
from scripts.checks import ROOT, docs, name_of, private, secrets, tracked
from scripts.pages import files
from scripts.set_names import changes
from tests.guarantees import __main__ as listed

LINES_MAX = 900
"""No module of the package is longer."""


def examples() -> Iterator[str]:
    """Each example in a docstring that prints something else than it says."""
    for path in tracked("objkv/*.py"):
        if ">>> " not in path.read_text():  # not imported
            continue
        module = import_module(name_of(path).removesuffix(".py").replace("/", "."))
        lines: list[str] = []
        runner = doctest.DocTestRunner()
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            if runner.run(test, out=lines.append).failed:
                line = (test.lineno or 0) + 1
                yield f"{name_of(path)}:{line}: mend the example\n{''.join(lines)}"
                lines.clear()


def guarantees() -> Iterator[str]:
    """Each edit that breaks a guarantee and fits the code no more, and each test that is gone."""
    for one in listed.stale(listed.guarantees()):
        yield f"tests/guarantees: {one}"


def names() -> Iterator[str]:
    """Files that spell names or version otherwise than ``pyproject.toml`` and the package, or name
    other versions of vLLM."""
    for path, _ in changes(ROOT):
        yield f"{name_of(path)}:1: differs from pyproject.toml: run python scripts/set_names.py"
    (major, least), (_, end) = VERSION_MIN, VERSION_END
    window = f"vllm>={major}.{least},<{major}.{end}"
    if f'"{window}"' not in (ROOT / "pyproject.toml").read_text():
        yield f"pyproject.toml:1: the extra vllm is not {window}, which objkv doctor accepts"
    page = (ROOT / "docs" / "operations" / "upgrade.md").read_text()
    versions = re.findall(r"^\| (\d+\.\d+) \| yes \|", page, re.MULTILINE)
    if versions != [f"{major}.{minor}" for minor in range(least, end)]:
        yield f"docs/operations/upgrade.md:1: vLLM {', '.join(versions)} instead of {window}"


def pages() -> Iterator[str]:
    """Each file written from the code that is stale."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            yield f"{name_of(path)}:1: stale: run python -m scripts.pages"


def sizes() -> Iterator[str]:
    """Each module that is too long."""
    for path in tracked("objkv/*.py"):
        if (lines := len(path.read_text().splitlines())) > LINES_MAX:
            yield f"{name_of(path)}:{lines}: more than {LINES_MAX} lines: divide the module"


CHECKS = {
    "docs": docs.findings,
    "examples": examples,
    "guarantees": guarantees,
    "names": names,
    "pages": pages,
    "private": private.findings,
    "secrets": secrets.findings,
    "sizes": sizes,
}


def main(chosen: list[str]) -> int:
    """Exit status 1 if anything is found."""
    if unknown := set(chosen) - CHECKS.keys():
        print(f"no such check: {', '.join(unknown)}. There are {', '.join(CHECKS)}")
        return 2
    total = 0
    for name in chosen or CHECKS:
        began = time.monotonic()
        found = list(CHECKS[name]())
        print(*found, sep="\n", end="\n" if found else "")
        print(f"{name}: {len(found)} findings ({time.monotonic() - began:.0f} s)")
        total += len(found)
    return bool(total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
