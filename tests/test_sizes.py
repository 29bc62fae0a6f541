"""Sizes and names of modules: a module that outgrows its room is two nouns."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "objkv").rglob("*.py"))
MODULE_LINES_MAX = 300
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 5
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "base_classes"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, Function):
            yield node


def positional_parameters(function: Function) -> int:
    """Keyword-only ones do not count: they explain themselves where they are passed."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def is_command(module: Path, function: Function) -> bool:
    """Typer reads the options of a command from its parameters, however many."""
    return module.parent.name == "cli" and bool(function.decorator_list)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_fit_on_a_screen_or_few(module: Path) -> None:
    lines = len(module.read_text().splitlines())
    assert lines <= MODULE_LINES_MAX
    for function in functions(module):
        assert function.end_lineno is not None
        assert function.end_lineno - function.lineno < FUNCTION_LINES_MAX, function.name
        parameters = 0 if is_command(module, function) else positional_parameters(function)
        assert parameters <= PARAMETERS_MAX, function.name


def test_module_names_say_something() -> None:
    folders = {parent for module in MODULES for parent in module.parents if ROOT in parent.parents}
    assert not SAYS_NOTHING & {path.stem for path in [*MODULES, *folders]}


def test_modules_and_public_functions_say_what_they_are_for() -> None:
    silent = []
    for module in MODULES:
        tree = ast.parse(module.read_text())
        if tree.body and not ast.get_docstring(tree):
            silent.append(str(module.relative_to(ROOT)))
        silent += [
            f"{module.relative_to(ROOT)}:{node.lineno} {node.name}"
            for node in tree.body
            if isinstance(node, Function | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
    assert not silent
