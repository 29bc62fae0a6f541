"""From prompts to tasks: tokenized, and with the adapters told by what they hold."""

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
    """The tasks, and the prompts that are none."""

    tasks: list[Task] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Names:
    """What the names of models in requests mean."""

    base: Collection[str]
    """The base model's."""
    adapters: Collection[str]
    """Those of which it is known what they hold."""

    def adapter(self, prompt: WarmPrompt) -> str | None:
        """The adapter that the prompt is for. Raises ``ConfigError`` where nobody knows."""
        if prompt.model in self.adapters:
            return prompt.model
        if prompt.model is None or prompt.model in self.base:
            return None
        raise ConfigError(
            f"{prompt.name}: model {prompt.model} is not {' or '.join(sorted(self.base))}; if it "
            f"is a LoRA adapter, say what it holds: --lora {prompt.model}=FOLDER, or its digest"
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
    """Tokenize all; a prompt that cannot be is a failure, and not the end. Raises ``ConfigError``
    where a model is not known. ``give_up`` ends what ``tokenize`` waits for, when this is
    interrupted."""
    prepared = Prepared()
    every = iter(prompts)
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="objkv-warm-tokens")

    def one(prompt: WarmPrompt) -> list[int] | Failure:
        try:
            tokens = tokenize(prompt)
        except (PrefillError, ConfigError) as exc:
            return Failure(prompt.name, str(exc))
        return tokens or Failure(prompt.name, "it has no token")

    try:
        while batch := list(islice(every, _BATCH)):
            adapters = [names.adapter(prompt) for prompt in batch]
            for prompt, adapter, made in zip(batch, adapters, pool.map(one, batch), strict=True):
                if isinstance(made, Failure):
                    prepared.failures.append(made)
                    continue
                number = spool.add(made)
                assert number == len(prepared.tasks)
                # An adapter is part of what is stored, and so is the salt.
                prepared.tasks.append(Task(prompt.name, prompt.salt, adapter))
            on_progress(len(prepared.tasks))
    except BaseException:
        give_up()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return prepared


class AskingTokenizer:
    """Asks one of them, and another if that one does not answer. Safe from many threads."""

    def __init__(self, askers: Sequence[Prefiller]) -> None:
        self._askers = askers
        self._ended = Event()

    def __call__(self, prompt: WarmPrompt) -> list[int]:
        """Raises ``PrefillError``."""
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
        """End what is asked: nobody waits for it any more."""
        self._ended.set()
        for asker in self._askers:
            asker.close()
