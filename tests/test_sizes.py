"""Sizes, names and neighbours of modules: a module is one noun that a newcomer would look for."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "objkv").rglob("*.py"))
NAMES = {str(path.relative_to(ROOT)): path for path in MODULES}

MODULE_LINES_MAX = 600
FRAGMENT_LINES = 80
"""A module below this has two importers, or is a program, a package's face or a protocol."""
FOLDER_MODULES_MAX = 14
FUNCTION_LINES_MAX = 60
CONSTRUCTOR_LINES_MAX = 30
PARAMETERS_MAX = 5
SAYS_NOTHING = {"utils", "util", "common", "misc", "base_classes"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text())


def functions(module: Path) -> Iterator[Function]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, Function):
            yield node


def lines_of(function: Function) -> int:
    """From ``def`` to the last line, without the docstring: saying more is no fault."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        said = function.body[0]
        assert said.end_lineno is not None
        lines -= said.end_lineno - said.lineno + 1
    return lines


def positional_parameters(function: Function) -> int:
    """Keyword-only ones do not count: they explain themselves where they are passed."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def is_command(module: Path, function: Function) -> bool:
    """Typer reads the options of a command from its parameters, however many."""
    return module.parent.name == "cli" and bool(function.decorator_list)


def dotted(module: Path) -> str:
    parts = module.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importers() -> dict[str, set[str]]:
    """For each module the other modules of objkv that import it."""
    known = {dotted(module) for module in MODULES}
    found: dict[str, set[str]] = defaultdict(set)
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                continue
            for name in names & known - {dotted(module)}:
                found[name].add(dotted(module))
    return found


def is_entry_point_or_protocol(module: Path) -> bool:
    """A program, a command, what vLLM or a package's users import, or a module of protocols."""
    text = module.read_text()
    if module.name in ("__init__.py", "__main__.py", "plugin.py") or module.parent.name == "cli":
        return True
    if module.parent.name == "testing" or "if __name__ ==" in text:
        return True
    classes = [node for node in tree_of(module).body if isinstance(node, ast.ClassDef)]
    return bool(classes) and all(
        any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
        for node in classes
    )


@pytest.mark.parametrize("name", NAMES)
def test_modules_and_functions_keep_their_bounds(name: str) -> None:
    module = NAMES[name]
    assert len(module.read_text().splitlines()) <= MODULE_LINES_MAX
    for function in functions(module):
        bound = CONSTRUCTOR_LINES_MAX if function.name == "__init__" else FUNCTION_LINES_MAX
        if not is_command(module, function):
            assert lines_of(function) <= bound, function.name
            assert positional_parameters(function) <= PARAMETERS_MAX, function.name


def test_small_modules_are_shared_or_entered_from_outside() -> None:
    used = importers()
    fragments = [
        name
        for name, module in NAMES.items()
        if len(module.read_text().splitlines()) < FRAGMENT_LINES
        and len(used[dotted(module)]) < 2
        and not is_entry_point_or_protocol(module)
    ]
    assert not fragments


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    modules = Counter(
        str(module.parent.relative_to(ROOT)) for module in MODULES if module.name != "__init__.py"
    )
    del modules["objkv/cli"]  # one file a command
    assert {folder: n for folder, n in modules.items() if n > FOLDER_MODULES_MAX} == {}


def test_three_siblings_with_one_prefix_are_a_package() -> None:
    siblings = Counter(
        f"{module.parent.relative_to(ROOT)}/{module.stem.partition('_')[0]}_"
        for module in MODULES
        if "_" in module.stem.strip("_")
    )
    assert [prefix for prefix, n in siblings.items() if n >= 3] == []


def test_a_public_class_name_exists_once() -> None:
    classes = defaultdict(list)
    for name, module in NAMES.items():
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    assert {name: where for name, where in classes.items() if len(where) > 1} == {}


def test_module_names_say_something() -> None:
    folders = {parent for module in MODULES for parent in module.parents if ROOT in parent.parents}
    assert not SAYS_NOTHING & {path.stem for path in [*MODULES, *folders]}


def test_modules_and_public_functions_say_what_they_are_for() -> None:
    silent = []
    for name, module in NAMES.items():
        tree = tree_of(module)
        if tree.body and not ast.get_docstring(tree):
            silent.append(name)
        silent += [
            f"{name}:{node.lineno} {node.name}"
            for node in tree.body
            if isinstance(node, Function | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
    assert not silent
