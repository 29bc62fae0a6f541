"""Send requests of two tenants to two replicas, and print who shares with whom.

    python ask.py URL URL --adapters acme zenith

Each adapter is requested from the first replica, then from the second. Then the base model is
requested with a different ``cache_salt`` for each tenant.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import httpx

HOUSE_RULES = " ".join(
    f"Rule {number}: a clerk who meets case {number} writes form {number * 7 % 90}."
    for number in range(120)
)
SAVED_S = 60.0


def ask(url: str, max_tokens: int = 8, **asked: Any) -> dict[str, Any]:
    """Return the token counts of one response."""
    body = {"prompt": HOUSE_RULES, "max_tokens": max_tokens, "temperature": 0} | asked
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    response.raise_for_status()
    usage: dict[str, Any] = response.json()["usage"]
    return usage


def saved(url: str) -> int:
    """Return how many of the replica's chunks other replicas find, from its metrics."""
    saves = ("saves_accepted", "save_existed")
    names = tuple(f"vllm:objkv_{name}_total" for name in saves)
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith(names)))


def wait_until_saved(url: str, chunks: int, asked: dict[str, Any]) -> None:
    """Wait for background saves. The engine updates their metrics at its next step."""
    until = time.monotonic() + SAVED_S
    while saved(url) < chunks and time.monotonic() < until:
        time.sleep(0.1)
        ask(url, **(asked | {"prompt": "Hello", "max_tokens": 1}))


def callers(base: str, adapters: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each caller and the fields that distinguish its requests."""
    for adapter in adapters:
        yield f"adapter {adapter}", {"model": adapter}
    for tenant in adapters:
        yield f"base model, salt of {tenant}", {"model": base, "cache_salt": f"secret of {tenant}"}


def main() -> None:
    """Print one line per response."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs=2, metavar="URL")
    parser.add_argument("--model", default="model", help="the name of the base model")
    parser.add_argument("--adapters", nargs="+", required=True)
    given = parser.parse_args()
    for who, asked in callers(given.model, given.adapters):
        for place, url in zip(("first", "second"), given.urls, strict=True):
            before = saved(url)
            usage = ask(url, **asked)
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            print(f"{who}, {place} replica: {cached} of {usage['prompt_tokens']} tokens cached")
            # A chunk has 256 tokens by default.
            chunks = (usage["prompt_tokens"] - cached) // 256
            wait_until_saved(url, before + chunks, asked)


if __name__ == "__main__":
    main()
