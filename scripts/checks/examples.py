"""The examples in docstrings print what they say."""

import doctest
from collections.abc import Iterator
from importlib import import_module

from scripts.checks import name_of, tracked


def findings() -> Iterator[str]:
    """Each example that prints something else. Modules without examples are not imported."""
    for path in tracked("objkv/*.py"):
        if ">>> " not in path.read_text():
            continue
        module = import_module(name_of(path).removesuffix(".py").replace("/", "."))
        told: list[str] = []
        runner = doctest.DocTestRunner()
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            if runner.run(test, out=told.append).failed:
                line = (test.lineno or 0) + 1
                yield f"{name_of(path)}:{line}: mend the example\n{''.join(told)}"
                told.clear()
