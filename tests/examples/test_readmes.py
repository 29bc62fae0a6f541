"""What the READMEs of the examples say is there, and what is there they say."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from objkv.config import Config, load_config
from tests.examples.places import EXAMPLES, ROOT, need

FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))
PROGRAMS = sorted(EXAMPLES.rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(EXAMPLES))


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_each_example_has_a_page_that_says_first_what_it_is_and_shows_a_command(
    folder: Path,
) -> None:
    page = (folder / "README.md").read_text()
    title, _, rest = page.partition("\n\n")
    assert title.startswith("# ")
    assert re.match(r"[A-Z`\[]", rest), "a sentence before any list, table or command"
    assert not rest.startswith("```")
    assert "```" in page
    assert "OUTPUT" not in page
    assert f"({folder.name}/README.md)" in (EXAMPLES / "README.md").read_text()


def test_files_lie_in_a_folder_of_their_example() -> None:
    files = sorted(path.name for path in EXAMPLES.iterdir() if path.is_file())
    assert files == ["README.md", "notebook.py"]


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_files_that_a_page_runs_are_there(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    for path in re.findall(r"examples/[\w./-]+\.(?:py|sh|yaml|json)\b", page):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_scripts_are_bash_that_may_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    bash = need(shutil.which("bash"), "bash is missing")
    subprocess.run([bash, "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize("program", PROGRAMS, ids=name)
def test_programs_say_what_they_are_for(program: Path) -> None:
    assert ast.get_docstring(ast.parse(program.read_text()))


def test_the_settings_file_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    file = EXAMPLES / "settings" / "fleet.toml"
    monkeypatch.setenv("OBJKV_CONFIG_FILE", str(file))
    config = load_config()
    for setting, value in tomllib.loads(file.read_text()).items():
        assert setting in Config.model_fields
        assert getattr(config, setting) == value


@pytest.mark.parametrize(
    "page",
    [
        *("docs/quickstart.md", "docs/gpu-check.md", "docs/kubernetes.md", "examples/README.md"),
        *("examples/compose/.env.example", "examples/kubernetes/replicas.yaml"),
        "examples/kubernetes/production-stack.yaml",
    ],
)
def test_who_names_a_model_says_what_it_takes(page: str) -> None:
    """Where it comes from, its size, and whether terms must be accepted first."""
    text = (ROOT / page).read_text()
    assert re.search(r"Hugging Face|the Hub", text)
    assert re.search(r"[\d.]+ GB", text)
    assert "gated" in text
