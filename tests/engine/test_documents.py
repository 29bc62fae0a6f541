"""The commands of docs/quickstart.md and docs/evaluate.md, taken from the pages and run in their
order."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import ROOT, run_program
from tests.engine.servers import PATIENT
from tests.examples import tiny
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow
QUICKSTART, EVALUATE = (
    re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / name).read_text(), re.M | re.S)
    for name in ("quickstart.md", "evaluate.md")
)
"""Of each fence its kind and its text. The quickstart's are commands (``bash``), output (of no
kind), or alternatives that need a GPU."""
COMMANDS = "".join(text for kind, text in QUICKSTART if kind == "bash")
PORTS = "PORT_A=8001 PORT_B=8002\n"
TRANSFER = re.compile(r" *--kv-transfer-config '[^']*'")
PREFIX_TOKENS, PROMPTS = 2560, 8


def run(folder: Path, script: str) -> str:
    tiny.make()
    return run_program("bash", "-eo", "pipefail", "-c", script, folder=folder, **PATIENT)


def usages(text: str) -> list[dict[str, Any]]:
    found = [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{'")]
    assert len(found) == 2
    return found


def test_the_quickstarts_second_server_loads_what_the_first_computed(tmp_path: Path) -> None:
    assert PORTS in COMMANDS
    ports = f"PORT_A={free_port()} PORT_B={free_port()}\n"
    out = run(tmp_path, COMMANDS.replace(PORTS, ports))
    assert "\nworks" in f"\n{out}"
    first, second = usages(out)
    assert first["prompt_tokens"] == second["prompt_tokens"]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
    assert cached == [0, second["prompt_tokens"] // 256 * 256]
    assert cached[1] > 0
    assert "hit_tokens_total" in out
    shown = "".join(text for kind, text in QUICKSTART if not kind)
    assert usages(shown) == [first, second], "the page shows what its commands print"


def fence(begin: str) -> str:
    [found] = [text for _, text in EVALUATE if text.startswith(begin)]
    return str(found)


def evaluation(folder: Path, ports: list[int]) -> str:
    """All steps of the page but the fifth, as a reader without a GPU runs them, with the servers of
    the quickstart and a folder instead of a bucket."""
    quickstart, _, _ = COMMANDS.partition("serve $PORT_A\n")
    _, _, serve = quickstart.partition("serve() {")
    places = fence("export OBJKV_BULK_URL=")
    for url, instead in (
        ("s3://bucket/evaluation", f"file://{folder}/kv"),
        ("rediss://redis.example.com:6379/0", f"sqlite:///{folder}/index.sqlite"),
    ):
        assert url in places
        places = places.replace(url, instead)
    without_plugin = fence("python -c").rstrip("\n")
    measure = fence("bench() {").replace("vllm bench serve", without_plugin)
    (folder / "prompt.json").write_text(json.dumps([1] * 512))
    servers = (
        f"{start} {port}\necho server {port}\nbench {port}\n"
        f"curl --silent http://127.0.0.1:{port}/metrics >metrics\n"
        "grep ^vllm:objkv_hit_tokens_total metrics || true\n"
        "kill $SERVERS\nwait\nSERVERS="
        for start, port in zip(("plain", "serve", "serve"), ports, strict=True)
    )
    return "\n".join(
        (
            quickstart.replace(PORTS, "SERVERS=\n"),
            f"plain() {{{TRANSFER.sub('', serve)}",
            places,
            f"mkdir -p {folder}/kv",
            fence("make demo").replace("make demo\n", ""),
            fence("objkv bench"),
            measure.partition("bench 8003")[0],
            *servers,
            fence("objkv match").splitlines()[0],
            fence("OBJKV_PRICE_GPU_HOUR="),
        )
    )


def test_the_evaluations_third_server_loads_from_the_bucket_what_the_second_saved(
    tmp_path: Path,
) -> None:
    out = run(tmp_path, evaluation(tmp_path, [free_port() for _ in range(3)]))
    before, *servers = re.split(r"^server \d+$", out, flags=re.MULTILINE)
    assert "works" in before
    assert "bulk get 8 MiB" in before
    for said in servers:
        assert re.search(rf"Successful requests: +{PROMPTS}\b", said), said
        assert "Median TTFT" in said
    found = [re.search(r"^vllm:objkv_hit_tokens_total\S* (\S+)$", said, re.M) for said in servers]
    plain, second, third = (float(one[1]) if one else None for one in found)
    assert (plain, second) == (None, 0)
    assert third is not None
    assert third >= PROMPTS * PREFIX_TOKENS
    assert "saved:" in servers[2]
