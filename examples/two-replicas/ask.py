"""Send each replica a question about the same document and print how many tokens were cached.

python ask.py http://127.0.0.1:8001 http://127.0.0.1:8002 [--model NAME]
"""

import argparse
import time
from typing import Any

import httpx

DOCUMENT = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(300))
QUESTIONS = ("How many boxes are on shelf 12?", "Which shelves hold more than 80 boxes?")
SAVED_S = 60.0


def ask(url: str, model: str, prompt: str, max_tokens: int = 16) -> dict[str, Any]:
    """Return the replica's response."""
    asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def saved(url: str) -> int:
    """Return how many chunks the replica has saved or found stored, from its metrics."""
    names = ("vllm:objkv_saves_total", "vllm:objkv_save_existed_total")
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(names)))


def wait_until_saved(url: str, model: str, chunks: int) -> None:
    """Wait for background saves. The engine updates their metrics at its next step."""
    until = time.monotonic() + SAVED_S
    while saved(url) < chunks and time.monotonic() < until:
        time.sleep(0.5)
        ask(url, model, "Hello", max_tokens=1)


def main() -> None:
    """Print one line per response."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--model", default="model")
    given = parser.parse_args()
    for number, url in enumerate(given.urls):
        question = QUESTIONS[number % len(QUESTIONS)]
        before = saved(url)
        started = time.monotonic()
        answer = ask(url, given.model, f"{DOCUMENT}\n\n{question}\n")
        seconds = time.monotonic() - started
        usage = answer["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        print(
            f"{url}: {cached} of {usage['prompt_tokens']} prompt tokens were cached, "
            f"{seconds:.2f} s"
        )
        # A chunk has 256 tokens by default.
        wait_until_saved(url, given.model, before + (usage["prompt_tokens"] - cached) // 256)


if __name__ == "__main__":
    main()
