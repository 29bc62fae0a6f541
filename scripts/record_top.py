"""Records ``objkv top`` on two real replicas that share a Valkey and a folder: docs/images/top.svg.

python scripts/record_top.py [--seconds 40]; takes a minute more than it records. It starts
``examples/two-replicas`` with a small model, asks both servers questions about a few documents
again and again, and films what the command shows.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Event, Thread

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script finds the repository only from here on: E402

from objkv.connector.programs.demo_replica import KV_CACHE_BYTES, make_model  # noqa: E402
from objkv.ops.demo import SCALES, VOCABULARY  # noqa: E402
from scripts.record_terminal import picture, record, thinned  # noqa: E402
from tests.support.servers.redis import valkey_server  # noqa: E402

SIZE = (148, 26)
DOCUMENTS = 6
PICTURE = ROOT / "docs" / "images" / "top.svg"
_COMMAND_STARTS_S = 6.0
TITLE = "objkv top: two replicas share what they computed"


def ask_on(url: str, seed: int, ended: Event) -> None:
    """Ask questions about documents, the first of them most often, until ``ended``."""
    drawn = random.Random(seed)  # noqa: S311  # the same questions every time
    length = SCALES["small"].documents[1]
    # Both servers busy at once leave no core for the command: 20 seconds to import its modules.
    ended.wait(_COMMAND_STARTS_S)
    while not ended.wait(drawn.uniform(1.5, 4.0)):
        document = min(drawn.randrange(DOCUMENTS), drawn.randrange(DOCUMENTS))
        tokens = random.Random(document).choices(range(3, VOCABULARY), k=length)  # noqa: S311  # not a secret
        prompt = [*tokens, *drawn.choices(range(3, VOCABULARY), k=60)]
        request = {"model": "model", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        try:
            # Otherwise the replica's own cache would answer.
            httpx.post(f"{url}/reset_prefix_cache", timeout=60)
            request |= {"ignore_eos": True, "return_token_ids": True}
            httpx.post(f"{url}/v1/completions", json=request, timeout=60)
        except httpx.HTTPError:
            return


def film(urls: list[str], seconds: float) -> str:
    """The picture."""
    ended = Event()
    askers = [Thread(target=ask_on, args=(url, seed, ended)) for seed, url in enumerate(urls)]
    for asker in askers:
        asker.start()
    command = [str(Path(sys.executable).with_name("objkv")), "top", "--every", "2"]
    for url in urls:
        command += ["--endpoint", url]
    try:
        frames = record(command, SIZE, seconds=seconds, keys={seconds - 2: b"q"})
    finally:
        ended.set()
        for asker in askers:
            asker.join()
    # What is left when the command has ended is a terminal without it.
    shown = [frame for frame in frames if any(cell[0] != " " for cell in frame.lines[1])]
    if not shown:
        raise SystemExit("objkv top showed nothing: is this machine too busy?")
    return picture(thinned(shown, idle_s=2.5, apart_s=1.0), SIZE, TITLE)


def run_replicas(seconds: float) -> None:
    """Start both replicas, and this script again beside them."""
    longest = str(SCALES["small"].longest)
    with tempfile.TemporaryDirectory() as name, valkey_server(Path(name) / "valkey") as valkey:
        settings = {
            "OBJKV_INDEX_URL": f"{valkey.url}/0",
            "OBJKV_BULK_URL": f"file://{name}/chunks",
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache is there in it only
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        example = str(ROOT / "examples" / "two-replicas" / "run.sh")
        engine = ("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32")
        lengths = ("--max-model-len", longest, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
        urls = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
        again = (sys.executable, __file__, "--seconds", str(seconds), *urls)
        model = str(make_model(Path(name), "small"))
        subprocess.run(
            [example, model, *engine, *lengths, "--", *again],
            cwd=name,
            env=os.environ | settings,
            check=True,
        )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("urls", nargs="*", help="replicas that run already")
    given = parser.parse_args()
    if not given.urls:
        run_replicas(given.seconds)
        return
    svg = film(given.urls, given.seconds)
    PICTURE.write_text(svg, encoding="utf-8")
    print(f"{PICTURE}: {len(svg) >> 10} KiB")


if __name__ == "__main__":
    main()
