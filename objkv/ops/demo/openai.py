"""One OpenAI-compatible vLLM server, asked over HTTP as any client would."""

import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any, Final
from urllib.error import HTTPError, URLError

from prometheus_client.parser import text_string_to_metric_families

from objkv.ops.demo.job import ANSWER_TOKENS, Answer, Prompt
from objkv.ops.demo.process import Program

MODEL: Final = "demo"
"""The name under which the servers of the demo serve their model."""
_ANSWER_S = 120.0
_COUNTERS = (
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:objkv_hit_tokens_total",
    "vllm:objkv_load_bytes_total",
    "vllm:objkv_load_failures_total",
    "vllm:objkv_saves_total",
    "vllm:objkv_save_drops_total",
)


class Server:
    """A server that ``program`` runs. All methods raise ``ProgramFailed``."""

    def __init__(self, program: Program, url: str) -> None:
        self.name = program.name
        self.url = url
        self._program = program
        # Never through a proxy: it is on this machine.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def wait_until_ready(self, *, bound_s: float) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + bound_s
        while True:
            self._program.check()
            try:
                with self._http.open(f"{self.url}/health", timeout=5):
                    return
            except OSError:  # refused, reset, late or not ready: whatever it is, it may pass
                if time.monotonic() > deadline:
                    raise self._program.failed(f"did not serve after {bound_s:.0f} s") from None
            time.sleep(0.25)

    def ask(self, prompt: Prompt, *, salt: str | None = None) -> Answer:
        """The greedy answer, on a replica that remembers nothing of earlier prompts itself.

        Prompts with a ``salt`` share nothing with those that have another, or none.
        """
        self._forget()
        request: dict[str, Any] = {
            "model": MODEL,
            "prompt": list(prompt.tokens),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if salt is not None:
            request["cache_salt"] = salt
        start, first_token_s, served = time.perf_counter(), None, 0
        tokens: list[int] = []
        for event in self._stream("/v1/completions", request):
            for choice in event["choices"]:
                tokens += choice["token_ids"] or ()
            if tokens and first_token_s is None:
                first_token_s = time.perf_counter() - start
            if event.get("usage"):
                details = event["usage"].get("prompt_tokens_details") or {}
                served = details.get("cached_tokens") or 0
        if first_token_s is None:
            raise self._program.failed(f"did not answer {prompt.name}")
        return Answer(
            prompt=prompt.name,
            tokens=tuple(tokens),
            served_tokens=served,
            first_token_s=first_token_s,
        )

    def metrics(self) -> dict[str, float]:
        """The counters that tell of objkv; only those that it has."""
        with self._open("/metrics") as response:
            text = response.read().decode()
        found = {
            sample.name: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        return {name: found[name] for name in _COUNTERS if name in found}

    def _forget(self) -> None:
        """Empty vLLM's own prefix cache; blocks may be held for a moment by saves under way."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            with self._open("/reset_prefix_cache", {}) as response:
                if json.load(response)["success"]:
                    return
            if time.monotonic() > deadline:
                raise self._program.failed("could not reset its prefix cache")
            time.sleep(0.1)

    def _stream(self, path: str, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, document) as response:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)

    def _open(self, path: str, document: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(  # noqa: S310  # the server that the demo itself started
            f"{self.url}{path}",
            data=None if document is None else json.dumps(document).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            return self._http.open(request, timeout=_ANSWER_S)
        except HTTPError as exc:
            told = exc.read().decode(errors="replace")[:500]
            raise self._program.failed(f"answered {path} with HTTP {exc.code}: {told}") from exc
        except URLError as exc:
            raise self._program.failed(f"did not answer {path}: {exc.reason}") from exc
