"""An engine that computes prompts for ``warm``: the caller's own, or one in a child process.

``python -m objkv.programs.warm`` reads the engine's arguments from the first line of its
input. Each further line is a request, and several run at once; each gets one answer line. vLLM's
output goes to standard error. The program ends at the end of its input.
"""

import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from threading import Condition, Thread
from typing import IO, Any

from objkv.background import at_once
from objkv.connector.model.weights import adapter_digest, adapter_files
from objkv.ops.warm.prefill import TRANSFER_PARAMS, PrefillError, PrefillReply, PrefillRequest
from objkv.ops.warm.prompts import Chat, WarmPrompt

CONNECTOR = {"kv_connector": "ObjKVConnector", "kv_role": "kv_both"}
_AT_ONCE = 64
_END_S = 30.0


class LlmAsker:
    """A ``Prefiller`` with a ``vllm.LLM`` of this process. The caller must not use it meanwhile."""

    def __init__(
        self, llm: Any, *, adapters: Mapping[str, str] | None = None, at_once: int = _AT_ONCE
    ) -> None:
        """``adapters``: folders of LoRA adapters by name."""
        self._llm = llm
        self._engine = llm.llm_engine
        self._adapters = {
            name: (number, folder)
            for number, (name, folder) in enumerate(sorted((adapters or {}).items()), start=1)
        }
        self._at_once = at_once
        self._number = 0
        self._changed = Condition()
        self._new: list[tuple[PrefillRequest, Future[PrefillReply]]] = []
        self._closed = False
        """Whether all further requests are refused."""
        self._why = "the engine was closed"
        self._thread = Thread(target=self._work, name="objkv-warm-engine", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """See ``Prefiller``."""
        return "the engine"

    @property
    def at_once(self) -> int:
        """See ``Prefiller``."""
        return self._at_once

    def check(self) -> None:
        """See ``Prefiller``."""
        with self._changed:
            if self._closed:
                raise PrefillError("down", self._why)

    def tokenize(self, prompt: WarmPrompt) -> list[int]:
        """See ``Prefiller``."""
        if prompt.tokens is not None:
            return list(prompt.tokens)
        tokenizer = self._llm.get_tokenizer()
        try:
            if prompt.chat is None:
                return list(tokenizer.encode(prompt.text))
            return _of_chat(tokenizer, prompt.chat)
        except Exception as exc:  # a template may raise anything
            raise PrefillError("refused", f"tokenizing failed: {exc}") from exc

    def ask(self, ask: PrefillRequest) -> PrefillReply:
        """See ``Prefiller``."""
        future = self.begin(ask)
        try:
            return future.result()
        except CancelledError as exc:
            raise PrefillError("down", "the engine was closed") from exc

    def begin(self, ask: PrefillRequest) -> Future[PrefillReply]:
        """Like ``ask``, without waiting."""
        future: Future[PrefillReply] = Future()
        with self._changed:
            if self._closed:
                future.set_exception(PrefillError("down", self._why))
            else:
                self._new.append((ask, future))
                self._changed.notify_all()
        return future

    def close(self) -> None:
        """See ``Prefiller``. The engine itself stays open."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _work(self) -> None:
        running: dict[str, Future[PrefillReply]] = {}
        new: deque[tuple[PrefillRequest, Future[PrefillReply]]] = deque()
        has_failed = False
        try:
            while self._wait(running, new):
                while new:
                    self._add(*new[0], running)
                    new.popleft()
                self._step(running)
        # Catch everything, including an engine's SystemExit, so that no caller waits forever.
        except BaseException as exc:
            has_failed = True
            self._why = f"the engine failed: {exc}"
        with self._changed:
            self._closed = True
            new.extend(self._new)
        for future in [*running.values(), *(future for _, future in new)]:
            if has_failed:
                future.set_exception(PrefillError("down", self._why))
            else:
                future.cancel()
        with contextlib.suppress(Exception):
            self._engine.abort_request(list(running))

    def _wait(
        self,
        running: Mapping[str, Future[PrefillReply]],
        new: deque[tuple[PrefillRequest, Future[PrefillReply]]],
    ) -> bool:
        """Wait for work; return False once closed."""
        with self._changed:
            while not self._new and not running and not self._closed:
                self._changed.wait()
            new.extend(self._new)
            self._new = []
            return not self._closed

    def _step(self, running: dict[str, Future[PrefillReply]]) -> None:
        if not running:
            return
        for output in self._engine.step():
            if output.finished and (future := running.pop(output.request_id, None)):
                future.set_result(PrefillReply(output.num_cached_tokens))

    def _add(
        self,
        ask: PrefillRequest,
        future: Future[PrefillReply],
        running: dict[str, Future[PrefillReply]],
    ) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        extra = {"kv_transfer_params": TRANSFER_PARAMS}
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=extra)
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.tokens)}
        if ask.salt is not None:
            prompt["cache_salt"] = ask.salt
        lora = None
        if ask.model is not None:
            if ask.model not in self._adapters:  # only its digest is configured
                why = f"adapter {ask.model}: the engine needs its folder (--lora NAME=FOLDER)"
                future.set_exception(PrefillError("refused", why))
                return
            lora = LoRARequest(ask.model, *self._adapters[ask.model])
        self._number += 1
        name = f"objkv-warm-{self._number}"
        try:
            self._engine.add_request(name, prompt, params, lora_request=lora)
        except (ValueError, TypeError) as exc:  # too long, or unknown token ids
            future.set_exception(PrefillError("refused", str(exc)))
        else:
            running[name] = future


def adapter_content(folder: Path) -> bytes | None:
    """Return the digest that replicas compute for the adapter in ``folder``; None without one."""
    digest = at_once(adapter_digest(adapter_files(folder)))
    return None if digest is None else bytes.fromhex(digest)


def _of_chat(tokenizer: Any, chat: Chat) -> list[int]:
    options = dict(chat.options)
    more = options.pop("chat_template_kwargs", {})
    options.pop("add_special_tokens", None)
    options.setdefault("add_generation_prompt", True)
    messages = [dict(message) for message in chat.messages]
    made = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, **options, **more
    )
    return list(made)


def _make(job: Mapping[str, Any]) -> Any:
    import vllm
    from vllm.platforms import current_platform

    arguments: dict[str, Any] = {
        "model": job["model"],
        "kv_transfer_config": CONNECTOR,
        "skip_tokenizer_init": not job["tokenizes"],
    }
    if job["adapters"]:
        arguments |= {"enable_lora": True, "max_loras": min(8, len(job["adapters"]))}
    if current_platform.is_cpu():
        # One process starts in a third of the time.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments["distributed_executor_backend"] = "uni"
    return vllm.LLM(**{**arguments, **job["arguments"]})


class _Answers:
    """Writes answer lines to the original standard output. Safe from many threads."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = Condition()

    def say(self, value: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(value) + "\n")
            self._file.flush()


def _serve(asker: LlmAsker, lines: IO[str], answers: _Answers) -> None:
    for line in lines:
        request = json.loads(line)
        number = request["id"]
        if request["kind"] == "tokenize":
            chat = request["chat"]
            prompt = WarmPrompt(
                "",
                text=request["text"],
                chat=chat and Chat(tuple(chat["messages"]), chat["options"]),
            )
            _answer(answers, number, lambda: {"tokens": asker.tokenize(prompt)})  # noqa: B023  # called now
            continue
        future = asker.begin(PrefillRequest(request["tokens"], request["salt"], request["adapter"]))
        future.add_done_callback(_replier(answers, number))


def _replier(answers: _Answers, number: int) -> Callable[[Future[PrefillReply]], None]:
    def reply(future: Future[PrefillReply]) -> None:
        if not future.cancelled():
            _answer(answers, number, lambda: {"cached_tokens": future.result().cached_tokens})

    return reply


def _answer(answers: _Answers, number: int, work: Callable[[], dict[str, Any]]) -> None:
    try:
        answers.say({"id": number, **work()})
    except PrefillError as exc:
        answers.say({"id": number, "trouble": exc.trouble, "error": str(exc)})


def main() -> None:
    """Reserve standard output for answers; redirect vLLM's output to standard error."""
    with os.fdopen(os.dup(1), "w") as file:
        os.dup2(2, 1)
        answers = _Answers(file)
        job = json.loads(sys.stdin.readline())
        llm = _make(job)
        asker = LlmAsker(llm, adapters=job["adapters"], at_once=job["at_once"])
        answers.say({"ready": True})
        _serve(asker, sys.stdin, answers)
        asker.close()
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":  # spawned worker processes import this file again
    main()
