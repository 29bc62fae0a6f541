"""Runs ``warm``: tokenizes prompts, sends them to endpoints, waits until they are stored, retries.

A prompt is done when the index has all its chunks, not when it is answered: replicas save in the
background and may drop saves. A run may be interrupted at any time, because a later one skips
stored prompts.
"""

import asyncio
import secrets
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import cycle, islice
from threading import Thread
from time import monotonic
from typing import Any, Final, Literal

from objkv.errors import ConfigError, StoreError, StoreUnavailable
from objkv.index.base import Record
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.ops.backends_view import HANDOFF_LAYOUT, BackendsView, read_identities, stored_namespaces
from objkv.ops.match import look_up
from objkv.ops.warm.endpoint import Endpoint, EndpointError, EndpointReport
from objkv.ops.warm.prompts import WarmPrompt
from objkv.stores.base import ReadStore

Call = Callable[[Coroutine[Any, Any, None]], None]
_BATCH: Final = 512
"""Prompts that are read, tokenized and looked up together."""
_TOKENIZING, _FINDERS = 8, 8
"""Concurrent requests for token ids, and threads for index lookups."""
_ROUNDS: Final = 6
"""Attempts to tokenize a prompt, per endpoint."""
SALT = "objkv-warm-"
"""The start of the salts of probe chunks."""
_CHUNK_TOKENS = 256
"""The default chunk, used while nothing is stored yet."""
_LOOK_PAUSE_S = 0.1
Ending = Literal["complete", "interrupted", "unreachable"]
NAMED_MAX = 1000


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """Limits of attempts and times."""

    attempts_max: int = 4
    """Attempts per prompt, not counting busy answers."""
    busy_max: int = 100
    """Busy answers per prompt."""
    save_s: float = 60.0
    """Time from the answer until the prompt is stored; afterwards it is sent again."""
    gone_s: float = 120.0
    """The run ends when no endpoint has answered for this time."""
    pause_s: float = 0.05
    """Pause between lookups of a pending save; grows to ten times this."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that is not stored."""

    name: str
    why: str


@dataclass(slots=True)
class WarmReport:
    """The report of one run."""

    mode: str
    """``endpoints``, ``model`` or ``check``."""
    namespace: str = ""
    model: str = ""
    ending: Ending = "complete"
    prompts: int = 0
    stored_before: int = 0
    """Prompts already stored completely."""
    short: int = 0
    """Prompts shorter than one chunk, which cannot be stored."""
    warmed: int = 0
    """Prompts stored now but not before."""
    failed: int = 0
    left: int = 0
    """Prompts not processed because of an early end."""
    asked_tokens: int = 0
    """Tokens of the prompts that were sent and answered."""
    cached_tokens: int = 0
    """The part of ``asked_tokens`` that was loaded or in an engine's cache, as far as reported."""
    saved_chunks: int = 0
    saved_bytes: int = 0
    """Newly stored bytes."""
    retries: int = 0
    seconds: float = 0.0
    endpoints: list[EndpointReport] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    """The first thousand failures."""
    why: str = ""
    """The reason of an early end."""

    @property
    def is_complete(self) -> bool:
        """Whether every prompt that can be stored is stored."""
        return self.ending == "complete" and not self.failed

    @property
    def done(self) -> int:
        """Prompts that are finished."""
        return self.stored_before + self.short + self.warmed + self.failed

    def fail(self, name: str, why: str) -> None:
        """Count and name a prompt that could not be warmed."""
        self.failed += 1
        if len(self.failures) < NAMED_MAX:
            self.failures.append(Failure(name, why))

    def plain(self) -> dict[str, Any]:
        return {"command": "warm", "complete": self.is_complete, **asdict(self)}


@dataclass(slots=True, eq=False)
class Task:
    """A prompt that is not stored."""

    name: str
    tokens: "array[int]"
    salt: str | None
    hashes: Sequence[bytes]
    """Prefix hashes of its whole chunks, at least one."""
    stored: int = 0
    """Leading chunks that are stored."""
    attempts: int = 0
    """Requests that failed, without busy answers."""
    busy: int = 0


class TaskQueue:
    """The prompts to compute, those with the most shared chunks first. For one thread. A prompt in
    progress claims its missing chunks until they are stored; another prompt that needs a claimed
    chunk waits. So the first prompt with a shared prefix runs alone, and the others load its
    chunks. Uses about 200 bytes per distinct chunk."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._stored: set[bytes] = set()
        self._claims: set[bytes] = set()
        self._waiting: defaultdict[bytes, list[Task]] = defaultdict(list)
        """The prompts that wait for each claimed chunk."""
        names: dict[bytes, bytes] = {}
        uses: Counter[bytes] = Counter()
        for task in tasks:
            # One object for each chunk, however many prompts have it.
            task.hashes = [names.setdefault(name, name) for name in task.hashes]
            uses.update(task.hashes)
            self._stored.update(task.hashes[: task.stored])
        most = sorted(tasks, key=lambda one: -sum(uses[name] - 1 for name in self._missing(one)))
        self._ready = deque(most)
        self._left = len(most)

    def __len__(self) -> int:
        """How many prompts have not ended."""
        return self._left

    def next(self) -> Task | None:
        """Return the next prompt and claim its missing chunks; None if all wait or none is left.
        If ``stored`` says that all is stored, other prompts computed it."""
        while self._ready:
            task = self._ready.popleft()
            missing = self._missing(task)
            if missing and missing[0] in self._claims:
                self._waiting[missing[0]].append(task)
                continue
            self._claims.update(missing)
            return task
        return None

    def retry(self, task: Task) -> None:
        """Put ``task`` first, to be sent once more."""
        self._claims.difference_update(task.hashes[task.stored :])
        self._ready.appendleft(task)

    def end(self, task: Task, *, is_stored: bool) -> None:
        """End a prompt that is now stored or has failed for good."""
        self._left -= 1
        for name in task.hashes[task.stored :]:
            self._claims.discard(name)
            if is_stored:
                self._stored.add(name)
            self._ready.extendleft(reversed(self._waiting.pop(name, ())))

    def _missing(self, task: Task) -> Sequence[bytes]:
        # A chunk's hash covers all chunks before it, so those are stored too.
        while task.stored < len(task.hashes) and task.hashes[task.stored] in self._stored:
            task.stored += 1
        return task.hashes[task.stored :]


@dataclass(frozen=True, slots=True)
class WarmJob:
    """What a run works with."""

    view: BackendsView
    endpoints: Sequence[Endpoint] = ()
    identity: Identity | None = None
    """None: find the namespace with a probe."""
    limits: WarmLimits = field(default_factory=WarmLimits)
    progress: Callable[[WarmReport], None] = lambda report: None
    """Called as prompts end, from another thread."""


def warm_by(job: WarmJob, prompts: Iterable[WarmPrompt], mode: str) -> WarmReport:
    """Compute the prompts that are not stored; in mode ``check`` only report them, and endpoints,
    if there are any, tokenize. Closes the endpoints. An interrupt, and endpoints or an index that
    do not answer any more, end it with a report. Raises ``ConfigError``, and ``StoreError`` if it
    cannot begin."""
    assert job.endpoints or (mode == "check" and job.identity is not None)
    every = iter(prompts)
    with ThreadPoolExecutor(_FINDERS, "objkv-warm-find") as finders, _calls() as call:
        run = _Run(job, WarmReport(mode), finders)
        try:
            if job.endpoints:
                call(run.check())
            while batch := list(islice(every, _BATCH)):
                call(run.add(batch))
            if mode == "check":
                for task in run.tasks:
                    stored = f"{task.stored} of {len(task.hashes)} chunks are stored"
                    run.report.fail(task.name, stored)
            else:
                call(run.compute())
        except KeyboardInterrupt:
            if run.report.ending != "interrupted":  # nothing was computed
                raise
        finally:
            for endpoint in job.endpoints:
                call(endpoint.close())
        return run.ended()


@contextmanager
def _calls() -> Iterator[Call]:
    """Yield a function that runs a coroutine on the loop of another thread, because the caller's
    may run one, as in a notebook. An interrupt of the caller cancels what it waits for."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="objkv-warm", daemon=True)
    thread.start()

    def call(work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            future.result()
        except BaseException:
            future.cancel()
            asyncio.run_coroutine_threadsafe(_until_all_ended(), loop).result()
            raise

    try:
        yield call
    finally:
        call(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _until_all_ended() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


class _Run:
    """One run. Its coroutines run on one loop, and never two of them at a time."""

    def __init__(self, job: WarmJob, report: WarmReport, finders: ThreadPoolExecutor) -> None:
        self.job = job
        self.report = report
        self.tasks: list[Task] = []
        self._queue = TaskQueue(())
        self._finders = finders
        self._identity = job.identity
        self._changed = asyncio.Event()
        """Set when there may be another task to send, or an endpoint to send one to."""
        self._tokenizing = asyncio.Semaphore(_TOKENIZING)
        self._unsaved: set[str] = set()
        """Prompts that were answered and not stored in time, since anything was stored."""
        self._answered_s: float | None = None
        """The first answer since anything was stored, by ``monotonic``; None without one."""

    async def check(self) -> None:
        """Check all endpoints. Raises ``StoreUnavailable`` if none answers."""

        async def error_of(endpoint: Endpoint) -> EndpointError | None:
            try:
                await endpoint.check()
            except EndpointError as exc:
                endpoint.failed(EndpointError("down", str(exc)))
                return exc
            return None

        errors = await asyncio.gather(*map(error_of, self.job.endpoints))
        if all(errors):
            raise StoreUnavailable("; ".join(map(str, errors)) + ": is vllm serve running there?")

    async def add(self, prompts: Sequence[WarmPrompt]) -> None:
        """Tokenize and look up ``prompts``, and add those that are not stored to ``tasks``."""
        every = await asyncio.gather(*map(self._tokens, prompts))
        self.report.prompts += len(prompts)
        known: list[tuple[WarmPrompt, array[int]]] = []
        for prompt, tokens in zip(prompts, every, strict=True):
            if isinstance(tokens, array):
                known.append((prompt, tokens))
            else:
                self.report.fail(prompt.name, tokens)
        if known and self._identity is None:
            await self._probe(known[0][1])
        await asyncio.gather(*(self._add(*one) for one in known))
        self.job.progress(self.report)

    async def compute(self) -> None:
        """Compute until every prompt is stored or has failed, or nothing answers any more."""
        self._queue = TaskQueue(self.tasks)
        self.report.ending = "interrupted"  # unless it gets to the end
        started_s = monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                while self._queue:
                    task = self._queue.next()
                    if task is None:
                        self._changed.clear()
                        await self._changed.wait()
                    elif task.stored == len(task.hashes):  # other prompts have all its chunks
                        self._end(task, is_stored=True)
                    else:
                        endpoint = await self._free_endpoint()
                        endpoint.running += 1
                        group.create_task(self._warm(task, endpoint))
            self.report.ending = "complete"
        except* StoreError as errors:
            self.report.ending, self.report.why = "unreachable", str(errors.exceptions[0])
        finally:
            self.report.seconds = monotonic() - started_s

    def ended(self) -> WarmReport:
        report = self.report
        if self._identity is not None:
            report.namespace = self._identity.namespace()
            report.model = self._identity.model
        report.endpoints = [endpoint.report for endpoint in self.job.endpoints]
        report.left = report.prompts - report.done
        self.job.progress(report)
        return report

    async def _tokens(self, prompt: WarmPrompt) -> "array[int] | str":
        """Return its token ids, or why it has none. Raises ``ConfigError`` for another model."""
        endpoints = [endpoint for endpoint in self.job.endpoints if endpoint.model]
        served = {endpoint.model for endpoint in endpoints}
        if (identity := self.job.identity) is not None:
            served |= {identity.model, identity.model.rpartition("/")[2]}
        if prompt.model is not None and prompt.model not in served:
            names = " or ".join(sorted(served))
            raise ConfigError(f"{prompt.name}: model {prompt.model} is not {names}")
        if prompt.tokens is not None:
            return array("I", prompt.tokens)
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
                if exc.kind == "refused":
                    break
                if (number + 1) % len(endpoints) == 0:
                    pause_s = 0.25 * 2 ** (number // len(endpoints))
                    await asyncio.sleep(min(30.0, max(exc.after_s or 0.0, pause_s)))
        return why

    async def _probe(self, tokens: Sequence[int]) -> None:
        """Set the common identity of all endpoints, and verify that they save to this store. Each
        computes a chunk of ``tokens`` under a random salt, which cannot be stored yet; its
        namespace is the one in which that appears."""
        view, wait_s = self.job.view, self.job.limits.save_s
        endpoints = [one for one in self.job.endpoints if one.model]
        try:
            found = {one.name: await _identity_of(one, tokens, view, wait_s) for one in endpoints}
        except EndpointError as exc:
            raise StoreUnavailable(f"the first request failed: {exc}") from exc
        if len({identity.namespace() for identity in found.values()}) > 1:
            each = ", ".join(f"{name} {identity.namespace()}" for name, identity in found.items())
            raise ConfigError(
                f"the endpoints do not share a namespace: {each}; objkv diff shows why; warm each "
                "group of endpoints separately"
            )
        self._identity = next(iter(found.values()))

    async def _add(self, prompt: WarmPrompt, tokens: "array[int]") -> None:
        assert self._identity is not None
        hashes = hashes_of(self._identity, tokens, prompt.salt)
        _, usable = await self._look_up(hashes)
        if not hashes:
            self.report.short += 1
        elif usable == len(hashes):
            self.report.stored_before += 1
        else:
            self.tasks.append(Task(prompt.name, tokens, prompt.salt, hashes, usable))

    async def _look_up(self, hashes: Sequence[bytes]) -> tuple[list[Record | None], int]:
        assert self._identity is not None
        what = partial(look_up, self.job.view.index, self._identity, hashes)
        return await asyncio.get_running_loop().run_in_executor(self._finders, what)

    async def _free_endpoint(self) -> Endpoint:
        """Wait for an endpoint that may compute a prompt. Raises ``StoreUnavailable``."""
        endpoints = self.job.endpoints
        while True:
            now_s = monotonic()
            free = [one for one in endpoints if one.running < one.at_once]
            if ready := [one for one in free if one.not_before_s <= now_s]:
                return min(ready, key=lambda one: (one.down_since_s is not None, one.running))
            since = [one.down_since_s for one in endpoints if one.down_since_s is not None]
            if len(since) == len(endpoints) and now_s - max(since) > self.job.limits.gone_s:
                errors = "; ".join(one.report.last_error for one in endpoints)
                raise StoreUnavailable(f"no endpoint answers any more: {errors}")
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    min((one.not_before_s - now_s for one in free), default=None)
                ):
                    await self._changed.wait()

    async def _warm(self, task: Task, endpoint: Endpoint) -> None:
        """Have ``endpoint`` compute a prompt, and wait until it is stored."""
        error: EndpointError | None
        try:
            cached = await endpoint.compute(task.tokens, task.salt)
            self.report.asked_tokens += len(task.tokens)
            self.report.cached_tokens += cached
            error = await self._wait_until_stored(task)
            if error is not None:
                endpoint.failed(error)
                self._end_unless_saving(task, endpoint)
        except (EndpointError, ConfigError) as exc:
            # ConfigError: another model is served now, or the API key is no longer accepted.
            error = exc if isinstance(exc, EndpointError) else EndpointError("down", str(exc))
            endpoint.failed(error)
        finally:
            endpoint.running -= 1
            self._changed.set()
        if error is not None:
            self._retry(task, error)

    async def _wait_until_stored(self, task: Task) -> EndpointError | None:
        """End an answered prompt once all of it is stored; return an error if that takes long."""
        limits = self.job.limits
        now_s, before, whole = monotonic(), len(task.hashes), len(task.hashes)
        ends_s, pause_s = now_s + limits.save_s, limits.pause_s
        if self._answered_s is None:
            self._answered_s = now_s
        while True:
            records, usable = await self._look_up(task.hashes)
            if usable == whole or usable > before:  # more than at the last look
                self._answered_s = None
                self._unsaved.clear()
            before = usable
            if usable == whole:
                self.report.saved_chunks += whole - task.stored
                self.report.saved_bytes += sum(one.nbytes for one in records[task.stored :] if one)
                self._end(task, is_stored=True)
                return None
            if monotonic() >= ends_s:
                when = f"{limits.save_s:.0f} s after it was computed"
                return EndpointError("failed", f"{usable} of {whole} chunks were stored {when}")
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 10 * limits.pause_s)

    def _end_unless_saving(self, task: Task, endpoint: Endpoint) -> None:
        """Raise ``StoreUnavailable`` if several prompts were answered and nothing is stored."""
        self._unsaved.add(task.name)
        wait_s = 2 * self.job.limits.save_s
        is_long = self._answered_s is not None and monotonic() - self._answered_s >= wait_s
        if is_long and len(self._unsaved) > 1:
            raise StoreUnavailable(nothing_saved(endpoint.name, wait_s))

    def _retry(self, task: Task, error: EndpointError) -> None:
        """Send ``task`` once more, or give it up."""
        task.busy += error.kind == "busy"
        task.attempts += error.kind != "busy"
        limits = self.job.limits
        is_spent = task.attempts >= limits.attempts_max or task.busy >= limits.busy_max
        all_down = all(one.down_since_s is not None for one in self.job.endpoints)
        # While other endpoints are up, the prompt is the cause.
        is_spent &= not (error.kind == "down" and all_down)
        if error.kind == "refused" or is_spent:
            self.report.fail(task.name, str(error))
            self._end(task, is_stored=False)
        else:
            self.report.retries += 1
            self._queue.retry(task)
            self._changed.set()

    def _end(self, task: Task, *, is_stored: bool) -> None:
        self.report.warmed += is_stored
        self._queue.end(task, is_stored=is_stored)
        self._changed.set()
        self.job.progress(self.report)


def hashes_of(identity: Identity, tokens: Sequence[int], salt: str | None) -> list[bytes]:
    """Return the prefix hashes of the prompt's whole chunks; only these can be stored."""
    extras = PromptExtras(salt=salt)
    return prefix_hashes(identity.namespace(), tokens, identity.chunk_tokens, extras)


def known_identities(bulk: ReadStore) -> dict[str, Identity]:
    """Return the identities of all namespaces with KV of prompts, without hand-offs."""
    every = read_identities(bulk, stored_namespaces(bulk))
    return {name: one for name, one in every if one.page_layout != HANDOFF_LAYOUT}


def nothing_saved(endpoint: str, wait_s: float) -> str:
    return (
        f"{endpoint} saved nothing here within {wait_s:.0f} s: check that it uses the objkv "
        "connector, that it may save (kv_role, role, quota), and that its bulk_url and index_url "
        "are those of this command; objkv doctor shows them here, the line 'objkv ready' in the "
        "server's log shows them there"
    )


async def _identity_of(
    endpoint: Endpoint, tokens: Sequence[int], view: BackendsView, wait_s: float
) -> Identity:
    salt = SALT + secrets.token_hex(8)
    longest, ends_s = 0, 0.0
    while True:
        known = await asyncio.to_thread(known_identities, view.bulk)
        sizes = {_CHUNK_TOKENS, *(identity.chunk_tokens for identity in known.values())}
        if max(sizes) > longest:  # the first time, and when a namespace of longer chunks appears
            longest = max(sizes)
            await _compute_chunk(endpoint, tokens, salt, sorted(sizes, reverse=True), wait_s)
            ends_s = monotonic() + wait_s
        for identity in known.values():
            first = hashes_of(identity, _of_size(tokens, identity.chunk_tokens), salt)
            [record], _ = await asyncio.to_thread(look_up, view.index, identity, first)
            if record is not None and record.shards:
                return identity
        if monotonic() >= ends_s:
            raise ConfigError(nothing_saved(endpoint.name, wait_s))
        await asyncio.sleep(_LOOK_PAUSE_S)


async def _compute_chunk(
    endpoint: Endpoint, tokens: Sequence[int], salt: str, sizes: Sequence[int], wait_s: float
) -> None:
    """Compute a chunk of the first of ``sizes`` that the endpoint accepts."""
    left, ends_s = list(sizes), monotonic() + wait_s
    while True:
        made = [*_of_size(tokens, left[0]), tokens[0]]  # the last token is never saved
        try:
            await endpoint.compute(made, salt)
            return
        except EndpointError as exc:
            if exc.kind == "refused" and len(left) > 1:  # longer than the model's context
                left.pop(0)
                continue
            pause_s = exc.after_s or 5 * _LOOK_PAUSE_S
            if exc.kind == "refused" or monotonic() + pause_s >= ends_s:
                raise
            await asyncio.sleep(pause_s)


def _of_size(tokens: Sequence[int], size: int) -> list[int]:
    """Return ``tokens``, cut or repeated to ``size``."""
    return list(islice(cycle(tokens), size))
