"""Send each replica a question about the same document and print how many tokens were cached.

python ask.py http://127.0.0.1:8001 http://127.0.0.1:8002 [--model NAME]
"""

import argparse
import sys
import time
from collections import Counter
from typing import Any

import httpx

DOCUMENT = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(300))
QUESTIONS = ("How many boxes are on shelf 12?", "Which shelves hold more than 80 boxes?")
SAVED_S = 60.0
PREFIX = "vllm:objkv_"
FINDABLE = ("saves_accepted_total", "save_existed_total")
"""Counters of chunks that other replicas find: the node's agent has them, or the store has."""
REASONS = (
    "lookup_deadlines_total",
    "lookup_errors_total",
    "lookup_refused_total",
    "admission_refused_total",
    "load_failures_total",
    "load_refused_total",
    "adapters_unknown_total",
)


def ask(url: str, model: str, prompt: str, max_tokens: int = 16) -> dict[str, Any]:
    """Return the replica's response."""
    asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=asked, timeout=600)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def metrics(url: str) -> tuple[Counter[str], dict[str, str]]:
    """Return objkv's counters of the replica and the meaning of each, by name."""
    counters, texts = Counter[str](), dict[str, str]()
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith(f"# HELP {PREFIX}"):
            name, _, text = line.removeprefix(f"# HELP {PREFIX}").partition(" ")
            texts[name] = text
        elif line.startswith(PREFIX):
            labelled, _, value = line.removeprefix(PREFIX).rpartition(" ")
            counters[labelled.partition("{")[0]] += int(float(value))
    return counters, texts


def findable(url: str) -> int:
    """Return how many chunks of the replica's prompts other replicas find."""
    counters, _ = metrics(url)
    return sum(counters[name] for name in FINDABLE)


def wait_until_findable(url: str, model: str, chunks: int) -> None:
    """Wait for background saves. The engine updates their metrics at its next step."""
    until = time.monotonic() + SAVED_S
    while findable(url) < chunks:
        if time.monotonic() >= until:
            print(f"{url}: {findable(url)} of {chunks} chunks were saved within {SAVED_S:.0f} s")
            return
        time.sleep(0.1)
        ask(url, model, "Hello", max_tokens=1)


def print_reasons(url: str, before: Counter[str]) -> None:
    """Print what the replica counted since ``before`` that explains why it loaded nothing."""
    after, texts = metrics(url)
    grown = after - before
    for name in REASONS:
        if grown[name]:
            print(f"  {name} +{grown[name]}: {texts.get(name, '')}")
    if not any(grown[name] for name in REASONS):
        print("  the replica found nothing stored: objkv match --explain says why, and its log")


def main() -> None:
    """Print one line per response."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--model", default="model")
    given = parser.parse_args()
    for number, url in enumerate(given.urls):
        question = QUESTIONS[number % len(QUESTIONS)]
        before, _ = metrics(url)
        started = time.monotonic()
        answer = ask(url, given.model, f"{DOCUMENT}\n\n{question}\n")
        seconds = time.monotonic() - started
        usage = answer["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        print(
            f"{url}: {cached} of {usage['prompt_tokens']} prompt tokens were cached, "
            f"{seconds:.2f} s"
        )
        if not cached and number:
            print_reasons(url, before)
        # A chunk has 256 tokens by default.
        computed = (usage["prompt_tokens"] - cached) // 256
        wait_until_findable(url, given.model, sum(before[name] for name in FINDABLE) + computed)


if __name__ == "__main__":
    try:
        main()
    except httpx.HTTPStatusError as exc:
        sys.exit(f"{exc.request.url}: {exc.response.text}")
    except httpx.TransportError as exc:
        sys.exit(f"{exc.request.url}: {exc}; is vllm serve running there, and its port open?")
