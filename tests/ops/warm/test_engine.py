"""The engine of a child process, with a child that speaks as it does and has no vLLM in it."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from objkv.ops.warm import engine
from objkv.ops.warm.engine import EngineProcess, WarmEngineJob
from objkv.ops.warm.prefill import PrefillError, PrefillRequest
from objkv.ops.warm.prompts import WarmPrompt

CHILD = """
import json, os, subprocess, sys
job = json.loads(sys.stdin.readline())
if job["model"] == "broken":
    sys.exit("ValueError: no such model")
if job["model"] == "invalid":
    os.close(1)  # its answers end, and only then it says why
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    sys.exit('''ValidationError: 1 validation error for ModelConfig
  Value error, Invalid repository ID: '/nonexistent'.
1. Provide a repository.
 [type=value_error, input_value={}]''' + "\\n  more" * 40)
say = lambda **values: print(json.dumps(values), flush=True)
say(ready=True)
for line in sys.stdin:
    order = json.loads(line)
    if order["kind"] == "tokenize":
        say(id=order["id"], tokens=[len(word) for word in order["text"].split()])
    elif order["salt"] == "die":
        os._exit(1)
    elif order["salt"] == "dead":
        say(id=order["id"], trouble="down", error="the engine failed")
    elif order["salt"] == "long":
        say(id=order["id"], trouble="refused", error="too long")
    else:
        say(id=order["id"], cached_tokens=len(order["tokens"]))
with open(job["arguments"]["file"], "w") as file:
    file.write("ended in order, " + os.environ["OBJKV_BULK_URL"])
"""


@pytest.fixture(autouse=True)
def vllm_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "find_spec", lambda name: name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its log is


def process(tmp_path: Path, model: str = "tiny") -> EngineProcess:
    job = WarmEngineJob(model, {"file": str(tmp_path / "end")})
    return EngineProcess(job, {"OBJKV_BULK_URL": "file:///x"}, command=("-c", CHILD))


def test_it_answers_many_at_once_and_ends_in_order(tmp_path: Path) -> None:
    child = process(tmp_path)
    child.check()
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(lambda n: child.ask(PrefillRequest([0] * n, None, None)), range(1, 100))
        )
    assert [reply.cached_tokens for reply in replies] == list(range(1, 100))
    assert child.tokenize(WarmPrompt("p", text="a bc def")) == [1, 2, 3]
    child.close()
    child.close()
    assert (tmp_path / "end").read_text() == "ended in order, file:///x"


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    child = process(tmp_path, "broken")
    with pytest.raises(PrefillError, match="no such model") as raised:
        child.check()
    assert raised.value.trouble == "down"
    child.close()
