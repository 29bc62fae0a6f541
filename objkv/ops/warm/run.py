"""Runs ``warm``: tokenizes prompts, sends them to endpoints, waits until they are stored, retries.

A prompt is done when the index has all its chunks, not when it is answered: replicas save in the
background and may drop saves. A run may be interrupted at any time, because a later one skips
stored prompts.
"""

import asyncio
from array import array
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from threading import Thread
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from objkv.errors import ConfigError, StoreError, StoreUnavailable
from objkv.keys.identity import Identity
from objkv.ops.backends_view import BackendsView
from objkv.ops.warm.endpoint import Endpoint, EndpointError
from objkv.ops.warm.lookup import Found, PromptLookup, find_identity_of
from objkv.ops.warm.order import Order, Task
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import WarmLimits, WarmProgress, WarmReport

T = TypeVar("T")
_BATCH: Final = 512
"""Prompts that are read, tokenized and looked up together."""
_TOKENIZING, _FINDERS = 8, 8
"""Concurrent requests for token ids, and threads for index lookups."""
_ROUNDS: Final = 6
"""Attempts to tokenize a prompt, per endpoint."""
_SAVING_FACTOR: Final = 4
"""Answered prompts with pending saves, per concurrent request."""
_WATCH_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class WarmJob:
    """What a run works with."""

    view: BackendsView
    endpoints: Sequence[Endpoint] = ()
    identity: Identity | None = None
    """None: find the namespace with a probe."""
    adapters: Mapping[str, bytes] = field(default_factory=dict)
    """Content digests of LoRA adapters by their names in requests."""
    base: Collection[str] = ()
    """Further names of the base model in requests, in addition to those of the endpoints."""
    limits: WarmLimits = field(default_factory=WarmLimits)
    progress: WarmProgress = field(default_factory=WarmProgress)


def warm_by(job: WarmJob, prompts: Iterable[WarmPrompt], mode: str = "endpoints") -> WarmReport:
    """Compute the prompts that are not stored. Closes the endpoints.

    An interrupt, endpoints that no longer answer and an unreachable index end it, and the report
    shows that. Raises ``ConfigError``, and ``StoreError`` if it cannot begin.
    """
    assert job.endpoints
    with _Loop() as loop, ThreadPoolExecutor(_FINDERS, "objkv-warm-find") as finders:
        run = _Run(job, WarmReport(mode), finders)
        try:
            loop.call(run.check())
            _add(loop, run, prompts)
            loop.call(run.compute())
        except KeyboardInterrupt:
            if run.report.ending != "interrupted":  # nothing was computed
                raise
            loop.call(run.look_once())
        finally:
            loop.call(run.close())
        return run.ended()


def check_stored(job: WarmJob, prompts: Iterable[WarmPrompt]) -> WarmReport:
    """Report which prompts are stored, without computing. Endpoints, if there are any, tokenize.
    Raises ``ConfigError`` and ``StoreError``."""
    assert job.identity is not None
    with _Loop() as loop, ThreadPoolExecutor(_FINDERS, "objkv-warm-find") as finders:
        run = _Run(job, WarmReport("check"), finders)
        try:
            if job.endpoints:
                loop.call(run.check())
            _add(loop, run, prompts)
        finally:
            loop.call(run.close())
        for task in run.tasks:
            stored = f"{task.stored} of {len(task.hashes)} chunks are stored"
            run.report.fail(task.name, stored)
        return run.ended()


def _add(loop: "_Loop", run: "_Run", prompts: Iterable[WarmPrompt]) -> None:
    """Read, tokenize and look up ``prompts``."""
    every = iter(prompts)
    while batch := list(islice(every, _BATCH)):
        loop.call(run.add(batch))


class _Run:
    """One run. Its coroutines run on one loop, and never two of them at a time."""

    def __init__(self, job: WarmJob, report: WarmReport, finders: ThreadPoolExecutor) -> None:
        self.job = job
        self.report = report
        self.tasks: list[Task] = []
        self._order = Order(())
        self._finders = finders
        self._lookup: PromptLookup | None = None
        self._changed, self._done = asyncio.Event(), asyncio.Event()
        """Whether there may be another task to send, and whether none is left."""
        self._saving: dict[Task, asyncio.Task[None]] = {}
        """Answered prompts that are not stored so far."""
        self._tokenizing = asyncio.Semaphore(_TOKENIZING)
        if job.identity is not None:
            self._found_namespace(job.identity)

    async def check(self) -> None:
        """Check all endpoints. Raises ``StoreUnavailable`` if none answers."""

        async def error_of(endpoint: Endpoint) -> EndpointError | None:
            try:
                await endpoint.check()
            except EndpointError as exc:
                endpoint.failed(EndpointError("down", str(exc)))
                return exc
            return None

        errors = list(filter(None, await asyncio.gather(*map(error_of, self.job.endpoints))))
        if not any(endpoint.model for endpoint in self.job.endpoints):
            raise StoreUnavailable("; ".join(map(str, errors)))
        for error in errors:
            self.job.progress.note(f"skipped for now: {error}")

    async def add(self, prompts: Sequence[WarmPrompt]) -> None:
        """Tokenize and look up ``prompts``, and add those that are not stored to ``tasks``."""
        adapters = list(map(self._adapter, prompts))
        every = await asyncio.gather(*map(self._tokens, prompts))
        self.report.prompts += len(prompts)
        known: list[tuple[WarmPrompt, str | None, array[int]]] = []
        for prompt, adapter, tokens in zip(prompts, adapters, every, strict=True):
            if isinstance(tokens, array):
                known.append((prompt, adapter, tokens))
                self.report.prompt_tokens += len(tokens)
            else:
                self.report.fail(prompt.name, tokens)
        if known and self._lookup is None:
            await self._probe(known[0][2])
        await asyncio.gather(*(self._add(*one) for one in known))
        self.job.progress.moved(self.report)

    async def compute(self) -> None:
        """Compute until every prompt is stored or has failed, or nothing answers any more."""
        if not self.tasks:
            return
        self._order = Order(self.tasks)
        self.report.ending = "interrupted"  # unless it gets to the end
        started_s = monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._watch())]
                running += [
                    group.create_task(self._work(endpoint, group))
                    for endpoint in self.job.endpoints
                    for _ in range(endpoint.at_once)
                ]
                await self._done.wait()
                for one in running:  # such as those that wait for an endpoint that is down
                    one.cancel()
            self.report.ending = "complete"
        except* StoreError as errors:
            self.report.ending, self.report.why = "unreachable", str(errors.exceptions[0])
        finally:
            self.report.seconds = monotonic() - started_s

    async def look_once(self) -> None:
        """Finish the answered prompts that are stored by now."""
        try:
            for task in list(self._saving):
                self._finish(task, await self._find(task.hashes))
        except StoreError:
            return

    async def close(self) -> None:
        """Close the endpoints."""
        for endpoint in self.job.endpoints:
            await endpoint.close()

    def ended(self) -> WarmReport:
        """Return the report, after the end."""
        report = self.report
        if self._lookup is not None:
            report.namespace = self._lookup.namespace
            report.model = self._lookup.identity.model
        report.endpoints = [endpoint.report() for endpoint in self.job.endpoints]
        report.left = report.prompts - report.done
        self.job.progress.moved(report)
        return report

    def _adapter(self, prompt: WarmPrompt) -> str | None:
        """Return the prompt's adapter, if any. Raises ``ConfigError`` for an unknown model."""
        if prompt.model is None or prompt.model in self.job.adapters:
            return prompt.model
        base = {one.model for one in self.job.endpoints if one.model} | {*self.job.base}
        if prompt.model in base:
            return None
        raise ConfigError(
            f"{prompt.name}: model {prompt.model} is not {' or '.join(sorted(base))}; if it "
            f"is a LoRA adapter, add --lora {prompt.model}=FOLDER, or its digest"
        )

    async def _tokens(self, prompt: WarmPrompt) -> "array[int] | str":
        """Return the prompt's token ids, from the first endpoint that answers; or why there are
        none."""
        if prompt.tokens is not None:
            return array("I", prompt.tokens)
        endpoints = [endpoint for endpoint in self.job.endpoints if endpoint.model]
        if not endpoints:
            raise ConfigError(
                f"{prompt.name}: is text, which a server tokenizes: name one with --endpoint, or "
                "give token ids"
            )
        why = ""
        for number in range(_ROUNDS * len(endpoints)):
            try:
                async with self._tokenizing:
                    tokens = await endpoints[number % len(endpoints)].tokenize(prompt)
                return array("I", tokens) if tokens else "the prompt has no tokens"
            except EndpointError as exc:
                why = str(exc)
                if exc.trouble == "refused":
                    break
                if (number + 1) % len(endpoints) == 0:
                    pause_s = 0.25 * 2 ** (number // len(endpoints))
                    await asyncio.sleep(min(30.0, max(exc.after_s or 0.0, pause_s)))
        return why

    async def _probe(self, tokens: Sequence[int]) -> None:
        view, endpoints = self.job.view, [one for one in self.job.endpoints if one.model]
        try:
            identity = await find_identity_of(
                endpoints, tokens, view.bulk, view.index, wait_s=self.job.limits.save_s
            )
            self._found_namespace(identity)
        except EndpointError as exc:
            raise StoreUnavailable(f"the first request failed: {exc}") from exc

    def _found_namespace(self, identity: Identity) -> None:
        self._lookup = PromptLookup(self.job.view.index, identity, self.job.adapters)

    async def _add(self, prompt: WarmPrompt, adapter: str | None, tokens: "array[int]") -> None:
        assert self._lookup is not None
        hashes = self._lookup.hashes(tokens, prompt.salt, adapter)
        found = await self._find(hashes)
        if not hashes:
            self.report.short += 1
        elif found.is_all:
            self.report.stored_before += 1
        else:
            task = Task(prompt.name, tokens, prompt.salt, adapter, hashes, found.usable)
            self.tasks.append(task)

    async def _find(self, hashes: Sequence[bytes]) -> Found:
        assert self._lookup is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._finders, self._lookup.find, hashes)

    async def _watch(self) -> None:
        """Raise ``StoreUnavailable`` once no endpoint has answered for the time allowed."""
        while True:
            await asyncio.sleep(min(_WATCH_S, self.job.limits.gone_s))
            since = [one.down_since_s for one in self.job.endpoints]
            down = [moment_s for moment_s in since if moment_s is not None]
            if self._saving or len(down) < len(since):
                continue
            if monotonic() - max(down) > self.job.limits.gone_s:
                errors = "; ".join(one.report().last_error for one in self.job.endpoints)
                raise StoreUnavailable(f"no endpoint answers any more: {errors}")

    async def _work(self, endpoint: Endpoint, group: asyncio.TaskGroup) -> None:
        """Send one prompt after the other to ``endpoint``."""
        while True:
            task = await self._next(endpoint)
            try:
                cached = await endpoint.compute(task.tokens, task.salt, task.adapter)
            except (EndpointError, ConfigError) as exc:
                # ConfigError: the API key is no longer accepted.
                error = exc if isinstance(exc, EndpointError) else EndpointError("down", str(exc))
                endpoint.failed(error)
                self._retry(task, error)
                continue
            self.report.asked_tokens += len(task.tokens)
            if cached is not None:
                self.report.cached_tokens = (self.report.cached_tokens or 0) + cached
            task.saved_by_s = monotonic() + self.job.limits.save_s
            self._saving[task] = group.create_task(self._wait_until_stored(task))

    async def _next(self, endpoint: Endpoint) -> Task:
        """Wait for a prompt that ``endpoint`` may compute."""
        saving_max = _SAVING_FACTOR * sum(one.at_once for one in self.job.endpoints)
        while True:
            await endpoint.ready()
            is_full = len(self._saving) >= saving_max
            task = None if is_full else self._order.next(endpoint)
            if task is None:
                self._changed.clear()
                await self._changed.wait()
            elif task.stored < len(task.hashes):
                return task
            else:  # other prompts have all its chunks
                self.report.shared += 1
                self._end(task, is_stored=True)

    async def _wait_until_stored(self, task: Task) -> None:
        pause_s = self.job.limits.pause_s
        while not self._finish(task, found := await self._find(task.hashes)):
            if monotonic() >= task.saved_by_s:
                del self._saving[task]
                count = f"{found.usable} of {found.chunks} chunks were stored"
                why = f"{count} {self.job.limits.save_s:.0f} s after it was computed"
                self._retry(task, EndpointError("failed", why))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 10 * self.job.limits.pause_s)

    def _finish(self, task: Task, found: Found) -> bool:
        """End an answered prompt if all of it is stored. Return whether it is."""
        if found.is_all:
            del self._saving[task]
            self.report.saved_chunks += found.chunks - task.stored
            self.report.saved_bytes += sum(found.nbytes[task.stored :])
            self._end(task, is_stored=True)
        return found.is_all

    def _retry(self, task: Task, error: EndpointError) -> None:
        """Send ``task`` once more, or give it up."""
        task.busy += error.trouble == "busy"
        task.attempts += error.trouble != "busy"
        limits = self.job.limits
        is_spent = task.attempts >= limits.attempts_max or task.busy >= limits.busy_max
        all_down = all(one.down_since_s is not None for one in self.job.endpoints)
        # While other endpoints are up, the prompt is the cause.
        is_spent &= not (error.trouble == "down" and all_down)
        if error.trouble == "refused" or is_spent:
            self.report.fail(task.name, str(error))
            self._end(task, is_stored=False)
        else:
            self.report.retries += 1
            self._order.again(task)
            self._changed.set()

    def _end(self, task: Task, *, is_stored: bool) -> None:
        self.report.warmed += is_stored
        self._order.end(task, is_stored=is_stored)
        self._changed.set()
        if not self._order:
            self._done.set()
        self.job.progress.moved(self.report)


class _Loop:
    """An event loop on its own thread, because the caller's may run one, as in a notebook. A
    context manager. An interrupt of the caller cancels what it waits for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="objkv-warm", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result. Raises its exceptions."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            asyncio.run_coroutine_threadsafe(_until_all_ended(), self._loop).result()
            raise


async def _until_all_ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
