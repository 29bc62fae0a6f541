"""The commands of docs/quickstart.md, taken from the page and run in its order."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.endings import kill_session
from tests.engine.harness import ROOT, environment
from tests.engine.scenario import scenario
from tests.engine.servers import PATIENT
from tests.examples import tiny
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "quickstart.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORTS = "PORT_A=8001 PORT_B=8002\n"
BOUND_S = 900.0
"""For all commands. Two idle cores need two minutes."""


def commands() -> str:
    """The page's ``bash`` fences. Other fences are output, or alternatives that need a GPU."""
    return "".join(text for kind, text in FENCE.findall(PAGE.read_text()) if kind == "bash")


def shown() -> list[str]:
    return [text for kind, text in FENCE.findall(PAGE.read_text()) if not kind]


@scenario
def run_page(folder: Path, script: str, model: str) -> dict[str, Any]:
    assert tiny.make().name == model
    assert PORTS in script
    script = script.replace(PORTS, f"PORT_A={free_port()} PORT_B={free_port()}\n")
    return {"out": run_script(folder, script)}


def run_script(folder: Path, script: str) -> str:
    file = folder / "page.sh"
    file.write_text(f"set -eo pipefail\n{script}")
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    own = {"PATH": path, "XDG_CACHE_HOME": str(folder / "cache"), "no_proxy": "127.0.0.1"}
    with (folder / "errors.log").open("w") as errors:
        process = subprocess.Popen(
            [shutil.which("bash") or "bash", str(file)],
            cwd=folder,
            env=environment() | own | PATIENT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=BOUND_S)
        finally:
            kill_session(process.pid)
            process.wait()
    if process.returncode:
        logs = sorted(folder.glob("*.log"))
        said = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
        raise RuntimeError(f"exit {process.returncode}: {out[-3000:]}\n{said}")
    return out


def printed() -> str:
    out: str = run_page(commands(), tiny.make().name)["out"]
    return out


def test_the_second_server_loads_what_the_first_computed() -> None:
    out = printed()
    assert "\nworks" in f"\n{out}"
    first, second = usages(out)
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert cached(first) == 0
    assert cached(second) == second["prompt_tokens"] // 256 * 256 > 0
    assert "hit_tokens_total" in out


def test_the_page_shows_the_tokens_that_its_commands_print() -> None:
    assert usages("".join(shown())) == usages(printed())


def usages(text: str) -> list[dict[str, Any]]:
    found = [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{'")]
    assert len(found) == 2
    return found


def cached(usage: dict[str, Any]) -> int:
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens
