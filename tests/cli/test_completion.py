"""Completion in real shells: the candidates are those of the command line, and no Python starts."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from objkv.cli.app import all_commands
from objkv.cli.completion import SCRIPTS
from objkv.ops.sweep.remove import CATEGORIES
from tests.cli.conftest import Run, refused

ROOT = Path(__file__).parents[2]
SCRIPT = {shell: ROOT / "objkv/cli/completions" / name for shell, name in SCRIPTS.items()}
TAB_S = 0.1
FOLDER, FILE = "folder", "file.json"


@cache
def tree() -> dict[str, Any]:
    return dict(all_commands())


def options_of(path: str) -> set[str]:
    found = {
        option
        for parameter in tree()[path].params
        if hasattr(parameter, "is_flag") and not parameter.hidden
        for option in parameter.opts
        if option.startswith("--")
    }
    return found | {"--help"}


def choices_of(path: str) -> dict[str, set[str]]:
    """The options of a command whose values are fixed by their types."""
    return {
        parameter.opts[0]: set(get_args(parameter.type_descriptor.annotation))
        for parameter in tree()[path].params
        if hasattr(parameter, "is_flag")
        and get_origin(parameter.type_descriptor.annotation) is Literal
    }


def has_shell(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


class Shell:
    """Completes lines in one process of a shell, which finds no program to start."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    def complete(self, lines: Sequence[Sequence[str]]) -> list[set[str]]:
        """The candidates for the last word of each line."""
        text = getattr(self, f"_{self.name}")(lines)
        program = shutil.which(self.name)
        assert program is not None
        ran = subprocess.run(
            [program, *{"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[self.name]],
            input=text,
            env={"PATH": "/nowhere", "HOME": str(self.folder), "LC_ALL": "C.UTF-8"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        parts = ran.stdout.split("<end>\n")
        assert len(parts) == len(lines) + 1
        return [{line.split("\t")[0] for line in part.splitlines()} for part in parts[:-1]]

    def _bash(self, lines: Sequence[Sequence[str]]) -> str:
        each = "\n".join(
            f"COMP_WORDS=({' '.join(map(quoted, words))}) COMP_CWORD={len(words) - 1}; "
            "_objkv_completion objkv; printf '%s\\n' \"${COMPREPLY[@]}\" '<end>'"
            for words in ([w for word in line for w in broken(word)] for line in lines)
        )
        return f"{SCRIPT['bash'].read_text()}\n{each}\n"

    def _zsh(self, lines: Sequence[Sequence[str]]) -> str:
        # Replaces zsh's own completion functions.
        own = (
            "compdef() { : }; compset() { : }\n"
            '_describe() { local one; for one in "${(@P)2}"; do one="${one%%:*}"; '
            '[[ $one != "${words[CURRENT]#--*=}"* ]] || print -r -- "$one"; done }\n'
            "_files() { if [[ $1 == -/ ]]; then print -rl -- *(/); else print -rl -- *; fi }\n"
        )
        each = "\n".join(
            f"words=({' '.join(map(quoted, line))}); CURRENT={len(line)}; _objkv; print '<end>'"
            for line in lines
        )
        return f"{own}{SCRIPT['zsh'].read_text()}\n{each}\n"

    def _fish(self, lines: Sequence[Sequence[str]]) -> str:
        each = "\n".join(f"complete -C {quoted(' '.join(line))}; echo '<end>'" for line in lines)
        return f"{SCRIPT['fish'].read_text()}\n{each}\n"


def broken(word: str) -> Iterator[str]:
    """The words that bash makes of one: it also splits at ``=`` and ``:``."""
    yield from [part for part in re.split("([=:])", word) if part] or [""]


def quoted(word: str) -> str:
    return f"'{word}'"


@pytest.fixture(params=[pytest.param(name, marks=has_shell(name)) for name in SCRIPTS])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FILE).touch()
    return Shell(request.param, tmp_path)


def bare(candidates: set[str]) -> set[str]:
    """Without what a shell adds to a value: ``--option=`` before it, a slash behind a folder."""
    return {one.rpartition("=")[2].rstrip("/") for one in candidates} - {""}


def test_every_command_and_option_is_a_candidate(shell: Shell) -> None:
    groups = {path: set(c.commands) for path, c in tree().items() if hasattr(c, "commands")}
    visible = {
        path: {name for name in names if f"{path} {name}" in tree()}
        for path, names in groups.items()
    }
    assert set(visible) == {"objkv", "objkv bench"}
    found = shell.complete([[*path.split(), ""] for path in visible])
    assert [bare(one) for one in found] == list(visible.values())
    found = shell.complete([[*path.split(), "--"] for path in tree()])
    long = {path: {one for one in options_of(path) if one.startswith("--")} for path in tree()}
    assert dict(zip(tree(), found, strict=True)) == long


def test_fixed_values_are_candidates_behind_a_space_and_an_equals_sign(shell: Shell) -> None:
    known = {(path, one): values for path in tree() for one, values in choices_of(path).items()}
    assert ("objkv access", "--role") in known
    known["objkv sweep", "--only"] = set(CATEGORIES)
    lines = [[*path.split(), option, ""] for path, option in known]
    assert [bare(found) for found in shell.complete(lines)] == list(known.values())
    lines = [[*path.split(), f"{option}="] for path, option in known]
    assert [bare(found) for found in shell.complete(lines)] == list(known.values())
    assert bare(shell.complete([["objkv", "completion", ""]])[0]) == set(SCRIPTS)


def test_paths_are_candidates_where_an_option_or_an_argument_takes_one(shell: Shell) -> None:
    both, folder = {FILE, FOLDER}, {FOLDER}
    wanted: list[tuple[list[str], set[str]]] = [
        (["objkv", "ls", "--config", ""], both),
        (["objkv", "ls", "--config="], both),
        (["objkv", "export", "--out", ""], folder),
        (["objkv", "import", ""], folder),
        (["objkv", "warm", ""], both),
        (["objkv", "warm", "--check", "one.jsonl", ""], both),
    ]
    found = shell.complete([line for line, _ in wanted])
    assert [bare(one) for one in found] == [paths for _, paths in wanted]


def test_options_follow_arguments_and_free_text_has_no_candidates(shell: Shell) -> None:
    lines = [
        ["objkv", "ls", "abcd", "--pre"],
        ["objkv", "--debug", "access", "--role", "reader", "--t"],
        ["objkv", "bench", "store", "--rounds", "3", "--qu"],
        ["objkv", "ls", "--limit", ""],
        ["objkv", "ls", "--limit="],
        ["objkv", "nothing", ""],
        ["objkv", "ls", ""],
        ["objkv", "--config", "ls", "--bulk-url", "file:///x", "sweep", "--stra"],
        ["objkv", "--index-url=redis://ls:1", "-o", "wide", "bench", "store", "--qu"],
    ]
    found = [one - {""} for one in shell.complete(lines)]
    wanted = [{"--prefixes"}, {"--tenant"}, {"--quick"}, *[set()] * 4, {"--strangers"}, {"--quick"}]
    assert found == wanted


def test_a_tab_is_quick(shell: Shell) -> None:
    lines = [["objkv", "audit", "--"]] * 20
    shell.complete(lines[:1])
    before = os.times()
    shell.complete(lines)
    after = os.times()
    spent = after.children_user + after.children_system
    spent -= before.children_user + before.children_system
    assert spent / len(lines) < TAB_S


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_command_prints_the_script(run: Run, shell: str) -> None:
    ran = run("completion", shell)
    assert (ran.code, ran.err, ran.out) == (0, "", SCRIPT[shell].read_text())


def test_another_shell_is_wrong_usage(run: Run) -> None:
    refused(run("completion", "tcsh"), "'tcsh' is not one of 'bash', 'zsh', 'fish'")
