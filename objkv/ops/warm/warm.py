"""The parts of ``warm`` in their order: who is there, tokens, the namespace, and then the work."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from time import monotonic, sleep

from objkv.cache.promotion import HotLimits
from objkv.codec.seal import Seal
from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import ReadIndex, Record
from objkv.keys.identity import Identity
from objkv.ops.backends_view import BackendsView
from objkv.ops.warm.chat import LocalTokenizer
from objkv.ops.warm.endpoint import PrefillEndpoint
from objkv.ops.warm.fleet import PrefillFleet
from objkv.ops.warm.lookup import PromptLookup, known_identities
from objkv.ops.warm.prefill import Prefiller, PrefillError, PrefillRequest
from objkv.ops.warm.prepare import AskingTokenizer, Names, Prepared, Tokenize, prepare
from objkv.ops.warm.promote import Promotion, by_use, wanted_of
from objkv.ops.warm.prompts import WarmPrompt
from objkv.ops.warm.report import WarmReport
from objkv.ops.warm.run import TokenSpool, Warming, WarmLimits
from objkv.stores.base import ReadStore

SALT = "objkv-warm-"
"""How the salts of such chunks begin."""
_CHUNK_TOKENS = 256
"""Where nothing is stored yet: the usual chunk."""
_PAUSE_S, _BUSY_S = 0.1, 0.5
"""Between looks, and before it asks again who was busy."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Finds the namespace into which endpoints save, and whether that is in this store.

    Each endpoint computes a chunk under a salt made up on the spot, so that it cannot be stored
    yet; the namespace in which it appears is the endpoint's. Other namespaces of the same model may
    have other weights, another tenant or another layout.
    """

    bulk: ReadStore
    index: ReadIndex
    wait_s: float
    clock: Callable[[], float] = monotonic
    sleep: Callable[[float], None] = sleep

    def find(self, askers: Sequence[Prefiller], tokens: Sequence[int]) -> Identity:
        """The namespace of all of them.

        ``tokens``: of any prompt of theirs. Raises ``ConfigError`` if one saves elsewhere, or they
        do not share, and ``PrefillError``.
        """
        found = {asker.name: self._of(asker, tokens) for asker in askers}
        names = {identity.namespace() for identity in found.values()}
        if len(names) > 1:
            told = ", ".join(f"{name} {one.namespace()}" for name, one in found.items())
            raise ConfigError(
                f"the endpoints do not share: {told}; objkv diff says why, and each group of them "
                "is to be warmed by itself"
            )
        return next(iter(found.values()))

    def _of(self, asker: Prefiller, tokens: Sequence[int]) -> Identity:
        salt = SALT + secrets.token_hex(8)
        asked: list[int] = []
        longest = 0
        """Chunks that are longer than this were refused, or need not be asked for."""
        ends_s = self.clock() + self.wait_s
        while True:
            known = known_identities(self.bulk)
            wanted = max((one.chunk_tokens for one in known.values()), default=_CHUNK_TOKENS)
            if wanted > longest:
                sizes = {_CHUNK_TOKENS, *(one.chunk_tokens for one in known.values())}
                asked = self._ask(asker, tokens, salt, sorted(sizes, reverse=True))
                longest, ends_s = wanted, self.clock() + self.wait_s
                known = known_identities(self.bulk)  # it may have announced its own by now
            for identity in known.values():
                lookup = PromptLookup(self.index, identity)
                first = lookup.hashes(asked[: identity.chunk_tokens], salt)
                if first and any(lookup.find(first).nbytes):
                    return identity
            if self.clock() >= ends_s:
                raise ConfigError(
                    f"{asker.name} saved nothing here within {self.wait_s:.0f} s: does it run with "
                    "the objkv connector, does it save (kv_role, role, quota), and are bulk_url "
                    "and index_url the same here as there? objkv doctor shows what they are here; "
                    "its log has a line 'objkv ready'"
                )
            self.sleep(_PAUSE_S)

    def _ask(
        self, asker: Prefiller, tokens: Sequence[int], salt: str, sizes: Sequence[int]
    ) -> list[int]:
        """Have a chunk computed that is as long as the longest of ``sizes`` that it takes."""
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
    """Who is told how far it is."""

    stage: Callable[[str], None] = lambda text: None
    prepared: Callable[[int], None] = lambda count: None
    warmed: Callable[[WarmReport], None] = lambda report: None
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Means:
    """What it works with."""

    view: BackendsView
    adapters: Mapping[str, bytes]
    tokenizer: LocalTokenizer | None
    identity: Callable[[], Identity] | None
    """None: it is found out where they save."""
    watch: WarmProgress = field(default_factory=WarmProgress)
    base: frozenset[str] = frozenset()
    """Names that requests may have for the base model, beside what endpoints tell."""


def warm_by(
    means: Means, askers: Sequence[Prefiller], prompts: Iterable[WarmPrompt], patience: WarmLimits
) -> WarmReport:
    """Have ``askers`` compute the prompts. Raises ``ConfigError`` and ``StoreError``."""
    watch = means.watch
    watch.stage("asking who is there")
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
            watch.stage("finding out where they save")
            probe = Probe(means.view.bulk, means.view.index, patience.save_s)
            try:
                identity = probe.find(ready, spool.read(0))
            except PrefillError as exc:
                raise StoreUnavailable(f"no answer to a first request: {exc}") from exc
        watch.stage("warming")
        lookup = PromptLookup(means.view.index, identity, means.adapters)
        warming = Warming(prepared.tasks, spool, fleet, lookup, patience, on_progress=watch.warmed)
        report = warming.report
        report.mode = "endpoints" if served else "engine"
        _add_failures(report, prepared)
        warming.run()
        return report


def promote_stored(
    means: Means,
    prompts: Iterable[WarmPrompt] | None,
    identity: Identity,
    limits: HotLimits,
    *,
    seal: Seal | None = None,
    bytes_max: int | None = None,
) -> WarmReport:
    """Copy what is stored of the prompts to the hot store; without prompts, of the namespace, what
    is hit most first. Raises ``ConfigError`` and ``StoreError``."""
    view, watch = means.view, means.watch
    if view.hot is None:
        raise ConfigError(
            "there is no hot store to promote to: index_url is no Redis, or hot_payload_bytes_max "
            "is 0"
        )
    lookup = PromptLookup(view.index, identity, means.adapters)
    report = WarmReport("promote", lookup.namespace, identity.model)
    records: Iterable[Record]
    if prompts is None:
        watch.stage("reading the index")
        records = by_use(view.index.scan(lookup.namespace))
    else:
        watch.stage("reading prompts")
        records = _records(means, lookup, prompts, report)
    promotion = Promotion(view, limits, seal=seal)
    report.promotion = promotion.report
    watch.stage("promoting")
    report.ending = "interrupted"
    try:
        wanted = wanted_of(lookup.namespace, records)
        promotion.run(wanted, bytes_max=bytes_max, on_progress=lambda _: watch.warmed(report))
        report.ending = "complete"
    except KeyboardInterrupt:
        pass
    finally:
        promotion.close()
    for path, why in promotion.failures:
        report.name(path, why)
    return report


def check_stored(means: Means, prompts: Iterable[WarmPrompt], identity: Identity) -> WarmReport:
    """Say which prompts are stored. Raises ``ConfigError`` and ``StoreError``."""
    lookup = PromptLookup(means.view.index, identity, means.adapters)
    report = WarmReport("check", lookup.namespace, identity.model)
    means.watch.stage("reading prompts")
    if means.tokenizer is None:
        prompts = _with_tokens(prompts)
    _records(means, lookup, prompts, report)
    return report


def _with_tokens(prompts: Iterable[WarmPrompt]) -> Iterator[WarmPrompt]:
    """Raises ``ConfigError`` at a prompt of which nobody can know whether it is stored."""
    for prompt in prompts:
        if prompt.tokens is None:
            raise ConfigError(
                f"{prompt.name}: is text, and no engine is asked: give --tokenizer, the model's "
                "folder"
            )
        yield prompt


def _records(
    means: Means, lookup: PromptLookup, prompts: Iterable[WarmPrompt], report: WarmReport
) -> list[Record]:
    """The records of all that would be served of the prompts, each once."""
    own = means.tokenizer

    def tokenize(prompt: WarmPrompt) -> list[int]:
        if prompt.tokens is not None:
            return list(prompt.tokens)
        if own is None:
            raise ConfigError("text needs --tokenizer here: no engine is asked")
        return own.tokenize(prompt)

    found: dict[bytes, Record] = {}
    with closing(TokenSpool()) as spool:
        base = {lookup.identity.model, lookup.identity.model.rpartition("/")[2], *means.base}
        names = Names(base, means.adapters.keys())
        prepared = prepare(prompts, spool, tokenize, names, on_progress=means.watch.prepared)
        _add_failures(report, prepared)
        report.prompts += len(prepared.tasks)
        for number, task in enumerate(prepared.tasks):
            hashes = lookup.hashes(spool.read(number), task.salt, task.adapter)
            report.prompt_tokens += spool.length(number)
            told = lookup.find(hashes)
            if not hashes:
                report.short += 1
            elif not told.is_all:
                report.fail(task.name, f"{told.usable} of {told.chunks} chunks are stored")
            else:
                report.stored_before += 1
            for record in lookup.records(hashes[: told.usable]):
                found[record.prefix_hash] = record
    return list(found.values())


def _ready(fleet: PrefillFleet, watch: WarmProgress) -> list[Prefiller]:
    """Those that answer. Raises ``StoreUnavailable`` if none does."""

    def checked(asker: Prefiller) -> PrefillError | None:
        try:
            asker.check()
        except PrefillError as exc:
            return exc
        return None

    pool = ThreadPoolExecutor(len(fleet.seats), thread_name_prefix="objkv-warm-check")
    try:
        errors = list(pool.map(checked, [seat.asker for seat in fleet.seats]))
    except BaseException:  # an interruption, say: closed ones answer at once
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
    if not ready:  # which tells all of them
        raise StoreUnavailable("; ".join(str(error) for error in errors))
    for error in filter(None, errors):
        watch.note(f"left alone for now: {error}")
    return ready


def _without_work(prepared: Prepared) -> WarmReport:
    report = WarmReport("engine")
    _add_failures(report, prepared)
    return report


def _add_failures(report: WarmReport, prepared: Prepared) -> None:
    report.prompts += len(prepared.failures)
    for failure in prepared.failures:
        report.fail(failure.name, failure.why)
