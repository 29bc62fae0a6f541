"""Let one replica compute a prompt and another generate the answer, as a router would.

    python ask.py http://127.0.0.1:8001 http://127.0.0.1:8002

The first replica computes a document. Then it empties its cache, as if it had restarted, and
receives another question about the document. It loads the document from objkv, and NIXL transfers
it to the second replica.
"""

import argparse
import time
from typing import Any

import httpx

DOCUMENT = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(150))
QUESTIONS = ("How many boxes are on shelf 12?", "Which shelves hold more than 80 boxes?")
# NIXL's connector requires these in the first request. The response states where the KV is.
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
    """Request one completion."""
    asked = {"model": "model", "temperature": 0} | body
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def metric(url: str, name: str) -> float:
    """Return a counter of a replica."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def tick(url: str) -> None:
    """Run one step of the engine, which updates the metrics of background threads."""
    post(url, prompt="Hello", max_tokens=1)


def forget(url: str, chunks: int) -> None:
    """Empty the replica's own cache after it has saved ``chunks`` chunks."""
    until = time.monotonic() + SAVED_S
    while metric(url, "vllm:objkv_saves_accepted_total") < chunks and time.monotonic() < until:
        time.sleep(0.1)
        tick(url)
    until = time.monotonic() + SAVED_S
    while not httpx.post(f"{url}/reset_prefix_cache", timeout=60).json()["success"]:
        if time.monotonic() >= until:
            raise TimeoutError(f"{url}: requests still hold blocks after {SAVED_S:.0f} s")
        time.sleep(0.5)  # the engine frees the blocks of a request in its next steps


def main() -> None:
    """Send two questions about one document."""
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
            f"  prefill: {cached} of {usage['prompt_tokens']} prompt tokens were cached; "
            f"NIXL moved {moved / 2**20:.1f} MiB to decode"
        )
        forget(given.prefill, chunks=usage["prompt_tokens"] // 256)


if __name__ == "__main__":
    main()
