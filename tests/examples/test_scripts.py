"""The examples' scripts and settings: two servers, with a stand-in for vLLM and with real ones."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from objkv.config import Config, load_config
from tests.engine.harness import run_program
from tests.engine.model import make_adapter
from tests.examples.places import EXAMPLES, need_program
from tests.support.servers.ports import free_port

CHUNK = 256
ENGINE = ("--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "4096")
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
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
SCRIPTS = {"two-replicas": 2, "nixl": 4}


def ports(number: int) -> str:
    return " ".join(str(free_port()) for _ in range(number))


def start(
    name: str, folder: Path, *words: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the example's script, where ``python`` and ``vllm`` are the program above and there are
    two GPUs; each server's arguments."""
    programs = folder / "bin"
    programs.mkdir()
    for program in ("python", "vllm"):
        (programs / program).write_text(LISTENS.format(python=sys.executable))
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\necho GPU 1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(EXAMPLES / name / "run.sh"), "a model", *words],
        cwd=folder,
        env=os.environ | {"PATH": path, "PORTS": ports(SCRIPTS[name])},
        capture_output=True,
        text=True,
    )
    return done, [log.read_text() for log in sorted(folder.glob("*.log"))]


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_servers_are_told_the_same_have_a_gpu_each_and_end_with_the_command(
    name: str, tmp_path: Path
) -> None:
    command = ("bash", "-c", "echo both are up; exit 7")
    done, told = start(name, tmp_path, "--foo", "two words", "--", *command)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "both are up")
    assert len(told) == 2
    for one in told:
        assert '"argv": ["serve", "a model", ' in one
        assert '"--foo", "two words"' in one
        pid = one.partition('"pid": ')[2].partition(",")[0]
        assert not Path(f"/proc/{pid}").exists()
    devices = {one.partition('"CUDA_VISIBLE_DEVICES": ')[2][:3] for one in told}
    assert devices == {'"0"', '"1"'}


def test_scripts_are_bash_that_may_be_run() -> None:
    bash = need_program(shutil.which("bash"), "bash is missing")
    for script in EXAMPLES.rglob("*.sh"):
        assert os.access(script, os.X_OK)
        subprocess.run([bash, "-n", script], check=True)
        assert "set -euo pipefail" in script.read_text()


def test_the_settings_file_is_one() -> None:
    file = EXAMPLES / "settings" / "fleet.toml"
    config = load_config(environ={"OBJKV_CONFIG_FILE": str(file)})
    for setting, value in tomllib.loads(file.read_text()).items():
        assert setting in Config.model_fields
        assert getattr(config, setting) == value


def shares(out: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+)", out)]


@pytest.mark.slow
def test_two_replicas_and_their_tenants(model: Path, tmp_path: Path) -> None:
    """First each is asked about a document, then by tenants, and a router finds what is stored."""
    from transformers import AutoTokenizer

    for seed, name in enumerate(("acme", "zenith")):
        make_adapter(tmp_path / name, seed=seed)
    document = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(300))
    tokens = AutoTokenizer.from_pretrained(model)(f"{document}\n\nAnother question?")["input_ids"]
    pair = ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in pair.split()]
    asks = [
        f"python {EXAMPLES}/two-replicas/ask.py {' '.join(urls)}",
        f"python {EXAMPLES}/lora-tenants/ask.py {' '.join(urls)} --adapters acme zenith",
        f"python {EXAMPLES}/match/match.py {' '.join(map(str, tokens))}",
    ]
    out = run_program(
        *(str(EXAMPLES / "two-replicas" / "run.sh"), str(model), *ENGINE),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
        *(f"{name}={tmp_path / name}" for name in ("acme", "zenith")),
        *("--", "bash", "-ec", "\n".join(asks)),
        folder=tmp_path,
        PORTS=pair,
        VLLM_CPU_KVCACHE_SPACE="1",
        OBJKV_ADMISSION="always",  # what a busy machine measures must not decide what is loaded
    )
    *told, (found, asked) = shares(out)
    assert len(told) == 2 + 8
    for first, second in zip(told[::2], told[1::2], strict=True):
        assert first[0] == 0
        assert second[0] == second[1] // CHUNK * CHUNK > 1024
    assert 1024 < found <= asked // CHUNK * CHUNK
