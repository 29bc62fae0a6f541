"""All steps but the fifth of docs/evaluate.md, with the servers of the quickstart."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import ROOT
from tests.engine.scenario import scenario
from tests.engine.test_quickstart import FENCE, PORTS, commands, run_script
from tests.examples import tiny
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "evaluate.md").read_text()
TRANSFER = re.compile(r" *--kv-transfer-config '[^']*'")
PREFIX_TOKENS, PROMPTS = 2560, 8


def fence(begin: str) -> str:
    [found] = [text for _, text in FENCE.findall(PAGE) if text.startswith(begin)]
    return str(found)


def script(folder: Path, ports: tuple[int, int, int]) -> str:
    """What a reader without a GPU runs, on a folder instead of a bucket."""
    quickstart, _, _ = commands().partition("serve $PORT_A\n")
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
    define_bench, _, _ = measure.partition("bench 8003")
    (folder / "prompt.json").write_text(json.dumps([1] * 512))
    return "\n".join(
        (
            quickstart.replace(PORTS, "SERVERS=\n"),
            f"plain() {{{TRANSFER.sub('', serve)}",
            places,
            f"mkdir -p {folder}/kv",
            fence("make demo").replace("make demo\n", ""),
            fence("objkv bench"),
            define_bench,
            *(
                f"{start} {port}\necho server {port}\nbench {port}\n"
                f"curl --silent http://127.0.0.1:{port}/metrics >metrics\n"
                "grep ^vllm:objkv_hit_tokens_total metrics || true\n"
                "kill $SERVERS\nwait\nSERVERS="
                for start, port in zip(("plain", "serve", "serve"), ports, strict=True)
            ),
            fence("objkv match").splitlines()[0],
            fence("OBJKV_PRICE_GPU_HOUR="),
        )
    )


@scenario
def run_page(folder: Path) -> dict[str, Any]:
    tiny.make()
    ports = (free_port(), free_port(), free_port())
    return {"out": run_script(folder, script(folder, ports)), "ports": ports}


def test_the_third_server_loads_from_the_bucket_what_the_second_saved() -> None:
    ran = run_page()
    before, *servers = re.split(r"^server \d+$", ran["out"], flags=re.MULTILINE)
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
