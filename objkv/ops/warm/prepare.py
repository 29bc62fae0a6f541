"""Turns prompts into tasks: tokenizes them and resolves their adapters."""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from threading import Event

from objkv.errors import ConfigError
from objkv.ops.warm.prefill import Prefiller, PrefillError
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import Failure
from objkv.ops.warm.run import Task, TokenSpool

Tokenize = Callable[[WarmPrompt], list[int]]
_BATCH = 512
_WORKERS = 8
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Prepared:
    """The tasks, and the prompts that could not be tokenized."""

    tasks: list[Task] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Names:
    """The known model names in requests."""

    base: Collection[str]
    """Names of the base model."""
    adapters: Collection[str]
    """Adapters with a known content digest."""

    def adapter(self, prompt: WarmPrompt) -> str | None:
        """Return the prompt's adapter, if any. Raises ``ConfigError`` for an unknown model."""
        if prompt.model in self.adapters:
            return prompt.model
        if prompt.model is None or prompt.model in self.base:
            return None
        raise ConfigError(
            f"{prompt.name}: model {prompt.model} is not {' or '.join(sorted(self.base))}; if it "
            f"is a LoRA adapter, add --lora {prompt.model}=FOLDER, or its digest"
        )


def prepare(
    prompts: Iterable[WarmPrompt],
    spool: TokenSpool,
    tokenize: Tokenize,
    names: Names,
    *,
    on_progress: Callable[[int], None] = lambda count: None,
    give_up: Callable[[], None] = lambda: None,
) -> Prepared:
    """Tokenize all prompts; one that fails becomes a ``Failure``. Raises ``ConfigError`` for an
    unknown model. On an interrupt, ``give_up`` ends the requests that ``tokenize`` waits for."""
    prepared = Prepared()
    every = iter(prompts)
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="objkv-warm-tokens")

    def one(prompt: WarmPrompt) -> list[int] | Failure:
        try:
            tokens = tokenize(prompt)
        except (PrefillError, ConfigError) as exc:
            return Failure(prompt.name, str(exc))
        return tokens or Failure(prompt.name, "the prompt has no tokens")

    try:
        while batch := list(islice(every, _BATCH)):
            adapters = [names.adapter(prompt) for prompt in batch]
            for prompt, adapter, made in zip(batch, adapters, pool.map(one, batch), strict=True):
                if isinstance(made, Failure):
                    prepared.failures.append(made)
                    continue
                number = spool.add(made)
                assert number == len(prepared.tasks)
                # Adapter and salt are part of the chunks' keys.
                prepared.tasks.append(Task(prompt.name, prompt.salt, adapter))
            on_progress(len(prepared.tasks))
    except BaseException:
        give_up()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return prepared


class AskingTokenizer:
    """Tokenizes through a prefiller, and through another if it fails. Safe from many threads."""

    def __init__(self, askers: Sequence[Prefiller]) -> None:
        self._askers = askers
        self._ended = Event()

    def __call__(self, prompt: WarmPrompt) -> list[int]:
        """Return the prompt's token ids. Raises ``PrefillError``."""
        if prompt.tokens is not None:
            return list(prompt.tokens)
        askers = self._askers
        for attempt in range(_ROUNDS * len(askers)):
            try:
                return askers[attempt % len(askers)].tokenize(prompt)
            except PrefillError as exc:
                is_last = self._ended.is_set() or attempt + 1 == _ROUNDS * len(askers)
                if exc.trouble == "refused" or is_last:
                    raise
                if attempt % len(askers) == len(askers) - 1:
                    pause_s = 0.25 * 2 ** (attempt // len(askers))
                    self._ended.wait(min(30.0, max(exc.after_s or 0.0, pause_s)))
        raise AssertionError("no askers")

    def give_up(self) -> None:
        """Cancel all requests."""
        self._ended.set()
        for asker in self._askers:
            asker.close()
