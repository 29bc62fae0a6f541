"""The examples that start replicas themselves, as their READMEs say. Minutes: not for every run."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.harness import VLLM_CACHE
from tests.engine.model import make_adapter
from tests.examples.places import EXAMPLES, ROOT, need
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.wide
CHUNK = 256
ENGINE = ("--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "4096")
SHARED = re.compile(r"(\d+) of (\d+)")
BOUND_S = 1_200


def run(folder: Path, *command: str, **variables: str) -> str:
    """Run an example as a user does, from another folder, with nothing of objkv configured."""
    settings = ("OBJKV_", "VLLM_", "AWS_", "PYTHONHASHSEED")
    own = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    told = VLLM_CACHE | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        # What a busy machine measures must not decide what is loaded.
        "OBJKV_ADMISSION": "always",
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=own | told | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=BOUND_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    logs = "".join(log.read_text(errors="replace")[-3000:] for log in folder.glob("*.log"))
    assert process.returncode == 0, errors[-3000:] + logs
    print(out, logs, sep="\n")  # pytest shows them if the test fails
    return out


def ports(number: int) -> str:
    return " ".join(str(free_port()) for _ in range(number))


def shares(out: str) -> list[tuple[int, int]]:
    """(tokens not computed, all tokens) of each line that tells them."""
    return [(int(a), int(b)) for a, b in SHARED.findall(out)]


def test_two_replicas_and_their_tenants(model: Path, tmp_path: Path) -> None:
    """One start of the two for both examples: first each asks about a document, then tenants."""
    adapters = [make_adapter(tmp_path / name, seed=n) for n, name in enumerate(("acme", "zenith"))]
    pair = ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in pair.split()]
    asks = [
        f"python {EXAMPLES}/two-replicas/ask.py {' '.join(urls)}",
        f"python {EXAMPLES}/lora-tenants/ask.py {' '.join(urls)} --adapters acme zenith",
    ]
    out = run(
        tmp_path,
        *(str(EXAMPLES / "two-replicas" / "run.sh"), str(model), *ENGINE),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"),
        *(f"{adapter.name}={adapter}" for adapter in adapters),
        *("--", "bash", "-ec", "\n".join(asks)),
        PORTS=pair,
    )
    told = shares(out)
    assert len(told) == 2 + 8
    for first, second in zip(told[::2], told[1::2], strict=True):
        assert first[0] == 0
        assert second[0] == second[1] // CHUNK * CHUNK > 1024


def test_the_second_batch_computes_no_document(model: Path, tmp_path: Path) -> None:
    batch = EXAMPLES / "offline-batch"
    engine = {"enforce_eager": True, "dtype": "float32", "block_size": 32, "max_model_len": 4096}
    command = ("python", str(batch / "answer.py"), str(model), str(batch / "questions.jsonl"))
    runs = []
    for number in (1, 2):
        answers = tmp_path / f"answers-{number}.jsonl"
        run(
            tmp_path,
            *(*command, str(answers), "--engine", json.dumps(engine)),
            # One process, which starts sooner; a batch job of a user has several.
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        runs.append([json.loads(line) for line in answers.read_text().splitlines()])
    first, second = runs
    assert [one["answer"] for one in first] == [one["answer"] for one in second]
    assert len(second) == 4
    for one in second:
        assert one["not_computed"] >= one["prompt_tokens"] // CHUNK * CHUNK > 1024
    assert sum(one["not_computed"] for one in first) < sum(one["not_computed"] for one in second)


@pytest.fixture(scope="module")
def nixl() -> str:
    """A folder with NIXL for ``PYTHONPATH``; empty if this Python has it. 70 MB, fetched once."""
    if importlib.util.find_spec("nixl") is not None:
        return ""
    folder = ROOT / ".cache" / "nixl"
    if not (folder / "nixl").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target")
        subprocess.run([*pip, str(folder), "nixl", "nixl-cu12"], check=False)
    need(folder / "nixl", "NIXL could not be installed: pip install nixl nixl-cu12")
    return str(folder)


def test_prefill_loads_from_objkv_what_nixl_hands_to_decode(
    model: Path, tmp_path: Path, nixl: str
) -> None:
    out = run(
        tmp_path,
        *(str(EXAMPLES / "nixl" / "run.sh"), str(model), *ENGINE),
        PORTS=ports(4),
        KV_BUFFER_DEVICE="cpu",
        PYTHONPATH=nixl,
    )
    first, second = shares(out)
    assert first[0] == 0
    assert second[0] == second[1] // CHUNK * CHUNK >= 1024
    moved = [float(number) for number in re.findall(r"moved ([\d.]+) MiB", out)]
    assert moved[0] > 1
