"""The stages of ``warm``: check prefillers, tokenize, find the namespace, compute."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from time import monotonic, sleep

from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import ReadIndex
from objkv.keys.identity import Identity
from objkv.ops.backends_view import BackendsView
from objkv.ops.warm.chat import LocalTokenizer
from objkv.ops.warm.endpoint import PrefillEndpoint
from objkv.ops.warm.fleet import PrefillFleet
from objkv.ops.warm.lookup import PromptLookup, known_identities
from objkv.ops.warm.prefill import Prefiller, PrefillError, PrefillRequest
from objkv.ops.warm.prepare import AskingTokenizer, Names, Prepared, Tokenize, prepare
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import WarmReport
from objkv.ops.warm.run import TokenSpool, Warming, WarmLimits
from objkv.stores.base import ReadStore

SALT = "objkv-warm-"
"""The start of the salts of probe chunks."""
_CHUNK_TOKENS = 256
"""The default chunk, used while nothing is stored yet."""
_PAUSE_S, _BUSY_S = 0.1, 0.5
"""Pauses between lookups, and after a busy answer."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Finds the namespace that endpoints save to, and verifies that they save to this store.

    Each endpoint computes a chunk under a random salt, so it cannot be stored yet; the endpoint's
    namespace is the one in which the chunk appears. Other namespaces of the same model may have
    other weights, another tenant or another layout.
    """

    bulk: ReadStore
    index: ReadIndex
    wait_s: float
    clock: Callable[[], float] = monotonic
    sleep: Callable[[float], None] = sleep

    def find(self, askers: Sequence[Prefiller], tokens: Sequence[int]) -> Identity:
        """Return the common identity of all endpoints.

        ``tokens``: token ids of any prompt. Raises ``ConfigError`` if an endpoint saves
        to other stores than this command's, or if the endpoints' namespaces differ. Raises
        ``PrefillError`` if a request fails.
        """
        found = {asker.name: self._of(asker, tokens) for asker in askers}
        names = {identity.namespace() for identity in found.values()}
        if len(names) > 1:
            each = ", ".join(f"{name} {one.namespace()}" for name, one in found.items())
            raise ConfigError(
                f"the endpoints do not share a namespace: {each}; objkv diff shows why; warm each "
                "group of endpoints separately"
            )
        return next(iter(found.values()))

    def _of(self, asker: Prefiller, tokens: Sequence[int]) -> Identity:
        salt = SALT + secrets.token_hex(8)
        asked: list[int] = []
        longest = 0
        """The longest chunk requested so far; longer ones need another request."""
        ends_s = self.clock() + self.wait_s
        while True:
            known = known_identities(self.bulk)
            wanted = max((one.chunk_tokens for one in known.values()), default=_CHUNK_TOKENS)
            if wanted > longest:
                sizes = {_CHUNK_TOKENS, *(one.chunk_tokens for one in known.values())}
                asked = self._ask(asker, tokens, salt, sorted(sizes, reverse=True))
                longest, ends_s = wanted, self.clock() + self.wait_s
                known = known_identities(self.bulk)  # it may have published its identity by now
            for identity in known.values():
                lookup = PromptLookup(self.index, identity)
                first = lookup.hashes(asked[: identity.chunk_tokens], salt)
                if first and any(lookup.find(first).nbytes):
                    return identity
            if self.clock() >= ends_s:
                raise ConfigError(
                    f"{asker.name} saved nothing here within {self.wait_s:.0f} s: check that it "
                    "uses the objkv connector, that it may save (kv_role, role, quota), and that "
                    "its bulk_url and index_url are those of this command; objkv doctor shows "
                    "them here, the line 'objkv ready' in the server's log shows them there"
                )
            self.sleep(_PAUSE_S)

    def _ask(
        self, asker: Prefiller, tokens: Sequence[int], salt: str, sizes: Sequence[int]
    ) -> list[int]:
        """Compute a chunk of the longest of ``sizes`` that the endpoint accepts."""
        left, ends_s = list(sizes), self.clock() + self.wait_s
        while True:
            size = left[0]
            made = (list(tokens) * (size // len(tokens) + 1))[: size + 1]
            try:
                asker.ask(PrefillRequest(made, salt, None))
                return made
            except PrefillError as exc:
                if exc.trouble == "refused" and len(left) > 1:
                    left.pop(0)
                    continue
                pause_s = exc.after_s or _BUSY_S
                if exc.trouble == "refused" or self.clock() + pause_s >= ends_s:
                    raise
                self.sleep(pause_s)


@dataclass(frozen=True, slots=True)
class WarmProgress:
    """Callbacks for progress."""

    stage: Callable[[str], None] = lambda text: None
    prepared: Callable[[int], None] = lambda count: None
    warmed: Callable[[WarmReport], None] = lambda report: None
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Means:
    """Backends, adapters and tokenizer of a run."""

    view: BackendsView
    adapters: Mapping[str, bytes]
    tokenizer: LocalTokenizer | None
    identity: Callable[[], Identity] | None
    """None: find the namespace with a probe."""
    watch: WarmProgress = field(default_factory=WarmProgress)
    base: frozenset[str] = frozenset()
    """Further names of the base model in requests, in addition to those of the endpoints."""


def warm_by(
    means: Means, askers: Sequence[Prefiller], prompts: Iterable[WarmPrompt], patience: WarmLimits
) -> WarmReport:
    """Compute the prompts with ``askers``. Raises ``ConfigError`` and ``StoreError``."""
    watch = means.watch
    watch.stage("checking endpoints")
    fleet = PrefillFleet(askers)
    ready = _ready(fleet, watch)
    own = means.tokenizer
    asking = AskingTokenizer(ready)
    tokenize: Tokenize = asking if own is None else own.tokenize
    served = {asker.served.model for asker in ready if isinstance(asker, PrefillEndpoint)}
    names = Names(served | means.base, means.adapters.keys())
    with closing(TokenSpool()) as spool:
        watch.stage("reading prompts")
        prepared = prepare(
            prompts, spool, tokenize, names, on_progress=watch.prepared, give_up=asking.give_up
        )
        if not prepared.tasks:
            return _without_work(prepared)
        if means.identity is not None:
            identity = means.identity()
        else:
            watch.stage("finding the namespace")
            probe = Probe(means.view.bulk, means.view.index, patience.save_s)
            try:
                identity = probe.find(ready, spool.read(0))
            except PrefillError as exc:
                raise StoreUnavailable(f"the first request failed: {exc}") from exc
        watch.stage("warming")
        lookup = PromptLookup(means.view.index, identity, means.adapters)
        warming = Warming(prepared.tasks, spool, fleet, lookup, patience, on_progress=watch.warmed)
        report = warming.report
        report.mode = "endpoints" if served else "engine"
        _add_failures(report, prepared)
        warming.run()
        return report


def _with_tokens(prompts: Iterable[WarmPrompt]) -> Iterator[WarmPrompt]:
    """Raise ``ConfigError`` at a prompt without token ids, which cannot be looked up."""
    for prompt in prompts:
        if prompt.tokens is None:
            raise ConfigError(
                f"{prompt.name}: is text, and --check uses no engine: set --tokenizer to the "
                "model's folder"
            )
        yield prompt


def check_stored(means: Means, prompts: Iterable[WarmPrompt], identity: Identity) -> WarmReport:
    """Report which prompts are stored. Raises ``ConfigError`` and ``StoreError``."""
    lookup = PromptLookup(means.view.index, identity, means.adapters)
    report = WarmReport("check", lookup.namespace, identity.model)
    means.watch.stage("reading prompts")
    own = means.tokenizer

    def tokenize(prompt: WarmPrompt) -> list[int]:
        return own.tokenize(prompt) if own is not None else list(prompt.tokens or ())

    with closing(TokenSpool()) as spool:
        base = {lookup.identity.model, lookup.identity.model.rpartition("/")[2], *means.base}
        names = Names(base, means.adapters.keys())
        if own is None:
            prompts = _with_tokens(prompts)
        prepared = prepare(prompts, spool, tokenize, names, on_progress=means.watch.prepared)
        _add_failures(report, prepared)
        report.prompts += len(prepared.tasks)
        for number, task in enumerate(prepared.tasks):
            hashes = lookup.hashes(spool.read(number), task.salt, task.adapter)
            report.prompt_tokens += spool.length(number)
            stored = lookup.find(hashes)
            if not hashes:
                report.short += 1
            elif not stored.is_all:
                report.fail(task.name, f"{stored.usable} of {stored.chunks} chunks are stored")
            else:
                report.stored_before += 1
    return report


def _ready(fleet: PrefillFleet, watch: WarmProgress) -> list[Prefiller]:
    """Return the prefillers that answer. Raises ``StoreUnavailable`` if none does."""

    def checked(asker: Prefiller) -> PrefillError | None:
        try:
            asker.check()
        except PrefillError as exc:
            return exc
        return None

    pool = ThreadPoolExecutor(len(fleet.seats), thread_name_prefix="objkv-warm-check")
    try:
        errors = list(pool.map(checked, [seat.asker for seat in fleet.seats]))
    except BaseException:  # such as an interrupt: closing ends the checks at once
        for seat in fleet.seats:
            seat.asker.close()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for seat, error in zip(fleet.seats, errors, strict=True):
        if error is not None:
            seat.asked += 1
            fleet.failed(seat, PrefillError("down", str(error)))
    ready = [s.asker for s, error in zip(fleet.seats, errors, strict=True) if error is None]
    if not ready:
        raise StoreUnavailable("; ".join(str(error) for error in errors))
    for error in filter(None, errors):
        watch.note(f"skipped for now: {error}")
    return ready


def _without_work(prepared: Prepared) -> WarmReport:
    report = WarmReport("engine")
    _add_failures(report, prepared)
    return report


def _add_failures(report: WarmReport, prepared: Prepared) -> None:
    report.prompts += len(prepared.failures)
    for failure in prepared.failures:
        report.fail(failure.name, failure.why)
