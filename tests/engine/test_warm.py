"""Real servers are warmed; then everything is stored."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.keys.prefix import PromptExtras
from objkv.ops.chat import LocalTokenizer
from objkv.ops.match import match_prompt
from objkv.ops.warm.prompts import read_prompts
from objkv.ops.warm.run import known_identities
from objkv.telemetry import NullRecorder
from tests.engine import model
from tests.engine.servers import PATIENT, Server

pytestmark = pytest.mark.slow
OBJKV = Path(sys.executable).with_name("objkv")
GROUPS, PROMPTS, CHUNK = 3, 6, 256
SHARED, OWN = 2, 1
"""Chunks that a group shares, and that each of its prompts has more."""
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} : {{ m.content }} {{ eos_token }} "
    "{% endfor %}{% if add_generation_prompt %}assistant :{% endif %}"
)


def settings_in(folder: Path) -> dict[str, str]:
    places = {"BULK": f"file://{folder}/chunks", "INDEX": f"sqlite://{folder}/index.sqlite"}
    return PATIENT | {f"OBJKV_{name}_URL": url for name, url in places.items()}


def model_with_tokenizer(folder: Path) -> Path:
    """The tiny model, and words for most of its vocabulary."""
    target = folder / "tiny"
    shutil.copytree(model.make("llama"), target)
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}
    words |= {f"w{token}": token for token in range(4, 1000)}
    words |= {word: 1000 + n for n, word in enumerate(("user", "assistant", "system", ":"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def write_prompts(file: Path, *, groups: int = GROUPS, seed: int = 1) -> int:
    """Token ids, text and messages, a group of each; how many chunks they have together."""
    source = random.Random(seed)
    lines: list[dict[str, Any]] = []
    for group in range(groups):
        shared = [source.randrange(4, 1000) for _ in range(SHARED * CHUNK)]
        for _ in range(PROMPTS):
            own = [source.randrange(4, 1000) for _ in range(OWN * CHUNK)]
            text, more = (" ".join(f"w{token}" for token in part) for part in (shared, own))
            if group == 0:
                lines.append({"prompt": shared + own, "cache_salt": "acme"})
            elif group == 1:
                lines.append({"prompt": f"{text} {more}"})
            else:
                messages = [
                    {"role": "system", "content": text},
                    {"role": "user", "content": more},
                ]
                lines.append({"messages": messages, "model": "tiny"})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return groups * (SHARED + OWN * PROMPTS)


def warm(folder: Path, settings: dict[str, str], *arguments: str) -> Any:
    """Run ``objkv warm``; what it reports."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OBJKV_")}
    done = subprocess.run(
        [str(OBJKV), "warm", *arguments, "--json"],
        env=own | settings | {"XDG_CACHE_HOME": str(folder / "home"), "VLLM_HOST_IP": "127.0.0.1"},
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def stored(settings: dict[str, str], file: Path, tokenizer: Path) -> int:
    """The number of prompts, all chunks of all of which would be served, as ``match`` finds."""
    local, found = LocalTokenizer(tokenizer), 0
    with open_backends(load_config(environ=settings), NullRecorder()) as backends:
        [identity] = known_identities(backends.bulk).values()
        for prompt in read_prompts([str(file)]):
            extras = PromptExtras(salt=prompt.salt)
            report = match_prompt(backends.index, identity, local.tokenize(prompt), extras)
            assert report.usable_tokens == report.prompt_tokens // CHUNK * CHUNK
            found += 1
    return found


def test_servers_and_one_of_its_own_compute_and_save_each_prompt_where_servers_look(
    folder: Path,
) -> None:
    tiny, file = model_with_tokenizer(folder), folder / "prompts.jsonl"
    chunks = write_prompts(file)
    settings = settings_in(folder)
    with (
        Server(folder / "one", settings=settings, with_tokenizer=tiny) as one,
        Server(folder / "two", settings=settings, with_tokenizer=tiny) as two,
    ):
        for server in (one, two):
            server.wait_until_ready()
        ends = [word for server in (one, two) for word in ("--endpoint", server.url)]
        given = (str(file), *ends, "--concurrency", "1")
        report = warm(folder, settings, *given)
        assert stored(settings, file, tiny) == GROUPS * PROMPTS
        check = warm(folder, settings, *given, "--check")
        saved = [server.metrics()["vllm:objkv_saves_accepted_total"] for server in (one, two)]
    assert report["complete"]
    assert report["warmed"] == GROUPS * PROMPTS
    assert not any(endpoint["errors"] for endpoint in report["endpoints"])
    assert min(saved) > 1  # more than the probe
    assert sum(saved) <= chunks + len(saved)
    assert (check["mode"], check["stored_before"]) == ("check", GROUPS * PROMPTS)

    write_prompts(file, groups=2, seed=2)
    settings = settings_in(folder / "own")
    arguments = {
        "dtype": "float32", "max_model_len": "2048",
        "block_size": "32", "kv_cache_memory_bytes": str(256 << 20), "seed": "0",
    }  # fmt: skip
    words = [f"--engine-arg={name}={value}" for name, value in arguments.items()]
    words += ["--engine-arg=enforce_eager", "--model", str(tiny)]
    own = warm(folder, settings, str(file), *words)
    assert (own["mode"], own["warmed"]) == ("model", 2 * PROMPTS)
    assert own["namespace"] == report["namespace"]
    assert stored(settings, file, tiny) == 2 * PROMPTS
