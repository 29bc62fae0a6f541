"""Have one replica compute a prompt and another answer it, as a router in front of them would.

    python ask.py http://127.0.0.1:8001 http://127.0.0.1:8002

First a document is computed; then the first replica forgets it, as if it had been restarted, and is
asked another question about it: the document comes from objkv, and goes on to the second by NIXL.
"""

import argparse
import time
from typing import Any

import httpx

DOCUMENT = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(150))
QUESTIONS = ("How many boxes are on shelf 12?", "Which shelves hold more than 80 boxes?")
# What NIXL's connector wants of the first request: it answers with where the KV lies.
COMPUTE_FOR_ANOTHER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SAVED_S = 60.0


def post(url: str, **body: Any) -> dict[str, Any]:
    """One completion."""
    asked = {"model": "model", "temperature": 0} | body
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def metric(url: str, *names: str) -> float:
    """Counters of a replica, added up."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def tick(url: str) -> None:
    """Numbers of background threads are told with the next step of the engine: this is one."""
    post(url, prompt="Hello", max_tokens=1)


def forget(url: str, chunks: int) -> None:
    """Empty the replica's own cache, when it has saved so much."""
    until = time.monotonic() + SAVED_S
    while metric(url, "vllm:objkv_saves_total") < chunks and time.monotonic() < until:
        time.sleep(0.5)
        tick(url)
    while not httpx.post(f"{url}/reset_prefix_cache", timeout=60).json()["success"]:
        time.sleep(0.5)


def main() -> None:
    """Two questions about one document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefill")
    parser.add_argument("decode")
    given = parser.parse_args()
    for question in QUESTIONS:
        prompt = f"{DOCUMENT}\n\n{question}\n"
        moved = metric(given.decode, "vllm:nixl_bytes_transferred_sum")
        computed = post(
            given.prefill, prompt=prompt, max_tokens=1, kv_transfer_params=COMPUTE_FOR_ANOTHER
        )
        answered = post(
            given.decode,
            prompt=prompt,
            max_tokens=16,
            kv_transfer_params=computed["kv_transfer_params"],
        )
        tick(given.decode)
        moved = metric(given.decode, "vllm:nixl_bytes_transferred_sum") - moved
        usage = computed["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        print(f"{question} {answered['choices'][0]['text']!r}")
        print(
            f"  prefill: {cached} of {usage['prompt_tokens']} prompt tokens were not computed; "
            f"NIXL moved {moved / 2**20:.1f} MiB to decode"
        )
        forget(given.prefill, chunks=usage["prompt_tokens"] // 256)


if __name__ == "__main__":
    main()
