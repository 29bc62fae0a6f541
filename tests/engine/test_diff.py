"""``objkv diff`` of real replicas that differ in one thing names that thing and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, SharedStore, one_by_one
from tests.engine.harness import ROOT, run_replica
from tests.engine.job import Result
from tests.engine.prompts import prompt_of

pytestmark = pytest.mark.wide
PROMPT = prompt_of(CHUNK + 9)
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "copy": {"max_num_seqs": 4, "max_model_len": 1024},
    "blocks": {"block_size": 64},
    "dtype": {"dtype": "bfloat16"},
    "loads only": {"block_size": 128},
}


def objkv(store: SharedStore, *arguments: str) -> tuple[int, str]:
    """Exit code and standard output of the command, as users run it."""
    ends = (f"--bulk-url=file://{store.bulk}", f"--index-url=sqlite://{store.index_file}")
    command = [sys.executable, "-m", "objkv.cli", *arguments, *ends]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout


def namespace_of(result: Result) -> str:
    """What the replica said of itself when it started."""
    [told] = set(re.findall(r"objkv ready .*namespace=([0-9a-f]{32})", result.log))
    return str(told)


@scenario
def replicas(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    namespaces = {}
    for name, engine in ENGINES.items():
        role = "kv_consumer" if name == "loads only" else "kv_both"
        result = run_replica(store.job(*one_by_one([PROMPT]), engine=engine, role=role), folder)
        namespaces[name] = namespace_of(result)
        (folder / f"{name}.log").write_text(result.log)
    answers = {}
    for name in ENGINES:
        log = str(folder / f"{name}.log")
        other = log if name == "loads only" else namespaces[name]
        code, out = objkv(store, "diff", namespaces["plain"][:8], other, "--json")
        answers[name] = [code, json.loads(out)]
    text = objkv(store, "diff", namespaces["plain"], namespaces["blocks"])
    return {"namespaces": namespaces, "answers": answers, "text": list(text)}


@pytest.mark.parametrize("name", ["plain", "copy"])
def test_replicas_that_share_are_told_to(name: str) -> None:
    code, document = replicas()["answers"][name]
    assert (code, document["share"], document["differences"]) == (0, True, [])
    assert document["a"]["namespace"] == replicas()["namespaces"]["plain"]


@pytest.mark.parametrize(
    ("name", "cause", "values"),
    [
        ("blocks", "groups[0].block_size", [32, 64]),
        ("dtype", "extra.dtype", ["float32", "bfloat16"]),
        ("loads only", "groups[0].block_size", [32, 128]),
    ],
)
def test_exactly_what_differs_is_named(name: str, cause: str, values: list[Any]) -> None:
    code, document = replicas()["answers"][name]
    assert (code, document["share"]) == (1, False)
    [found] = [d for d in document["differences"] if d["follows_from"] is None]
    assert (found["field"], [found["a"], found["b"]]) == (cause, values)
    assert {d["follows_from"] for d in document["differences"]} <= {None, cause}
    assert document["b"]["namespace"] == replicas()["namespaces"][name]


def test_people_read_it_in_one_sentence() -> None:
    code, out = replicas()["text"]
    assert code == 1
    assert "they do not share: block_size of group 0 differs\n" in out
    assert "--block-size" in out
