"""How the scripts start two servers and end them: with a server in vLLM's place that only listens.

What real servers do when they are started so is in ``test_scripts``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.places import EXAMPLES
from tests.support.servers.ports import free_port

LISTENS = """\
#!{python}
import http.server, json, os, sys
if "import nixl" in sys.argv:
    sys.exit(0)
if "-c" in sys.argv:  # whether there is a package named vllm
    sys.exit(not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "vllm")))
names = ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_NIXL_SIDE_CHANNEL_PORT")
told = {{"argv": sys.argv[1:], "pid": os.getpid(), **{{n: os.environ.get(n) for n in names}}}}
print(json.dumps(told), flush=True)
if "--dies" in sys.argv:
    sys.exit("no such model")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
SCRIPTS = {"two-replicas": 2, "nixl": 4}


def start(
    name: str, folder: Path, *words: str, vllm: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the example's script, where ``python`` is the program above and there are two GPUs.

    ``vllm``: the command of that name is the same program, and its package is installed.
    """
    programs = folder / "bin"
    programs.mkdir()
    for program in ("python", "vllm") if vllm else ("python",):
        (programs / program).write_text(LISTENS.format(python=sys.executable))
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    ports = " ".join(str(free_port()) for _ in range(SCRIPTS[name]))
    return subprocess.run(
        [str(EXAMPLES / name / "run.sh"), "a model", *words],
        cwd=folder,
        env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PORTS": ports},
        capture_output=True,
        text=True,
    )


def servers(folder: Path) -> list[str]:
    """What each server was told, as it printed it."""
    return [log.read_text() for log in sorted(folder.glob("*.log"))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_are_told_the_same_and_each_has_a_gpu(name: str, tmp_path: Path) -> None:
    done = start(name, tmp_path, "--foo", "two words", "--", "echo", "both are up")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "both are up"
    told = servers(tmp_path)
    assert len(told) == 2
    assert all('"--model", "a model"' in one and '"--foo", "two words"' in one for one in told)
    devices = {one.partition('"CUDA_VISIBLE_DEVICES": ')[2][:3] for one in told}
    assert devices == {'"0"', '"1"'}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_vllm_command_is_used_if_its_package_is_installed(name: str, tmp_path: Path) -> None:
    done = start(name, tmp_path, "--", "echo", "both are up", vllm=True)
    assert done.returncode == 0
    assert all('"argv": ["serve", "a model", ' in one for one in servers(tmp_path))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_module_that_vllm_calls_deprecated_is_started(name: str, tmp_path: Path) -> None:
    start(name, tmp_path, "--", "echo", "both are up")
    assert all('"vllm.entrypoints.launchers.api_server.entry"' in one for one in servers(tmp_path))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_status_is_the_commands_and_nothing_runs_on(name: str, tmp_path: Path) -> None:
    done = start(name, tmp_path, "--", "bash", "-c", "exit 7")
    assert done.returncode == 7
    for one in servers(tmp_path):
        pid = one.partition('"pid": ')[2].partition(",")[0]
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_server_that_ends_is_told_with_its_last_words(name: str, tmp_path: Path) -> None:
    done = start(name, tmp_path, "--dies", "--", "echo", "never")
    assert done.returncode == 1
    assert "no such model" in done.stderr
    assert "never" not in done.stdout
