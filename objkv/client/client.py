"""The client: namespaces, matches, chunks, audits, pins and warming, without torch and vLLM."""

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from inspect import getfullargspec
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from objkv.assembly.backends import Backends, open_backends, read_lifecycle
from objkv.assembly.seal import open_seals
from objkv.background import at_once
from objkv.cache.lookup import OtherShapesIndex
from objkv.cache.match import covered, usable_chunks
from objkv.client.results import Chunk, Match, MatchEnd, Namespace
from objkv.config import Resolved, resolve_config
from objkv.config.prices import audit_prices
from objkv.errors import ConfigError, NotStored, PayloadError, StoreError
from objkv.index.base import ReadIndex, ShardRecords
from objkv.index.fields import are_hot
from objkv.index.guarded import for_operators
from objkv.keys.identity import GroupIdentity, Identity
from objkv.keys.prefix import PREFIX_HASH_BYTES, PromptExtras, prefix_hashes
from objkv.ops.audit.audit import audit_stages, make_report
from objkv.ops.audit.report import AuditReport
from objkv.ops.backends_view import BackendsView, read_identity, stored_namespaces
from objkv.ops.chat import LocalTokenizer
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.walk import Walk, find_scope
from objkv.ops.listing import find_identity, find_namespace
from objkv.ops.pin import PinnedPrefix, Pinner, chain_of, list_pins, served_prefix
from objkv.ops.runs import WorkPool
from objkv.ops.warm.prompts import to_prompt
from objkv.stores.base import ReadStore
from objkv.telemetry import NullRecorder

if TYPE_CHECKING:
    from objkv.ops.warm.run import WarmReport

logger = logging.getLogger(__name__)
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or a request of OpenAI's API as a dict."""
_WORKERS = 16
_WEEK_S = 7 * 24 * 3600.0
_KEEP_S = 30.0


def open(
    *,
    bulk_url: str | None = None,
    index_url: str | None = None,
    config: "str | PathLike[str] | None" = None,
    tokenizer: "str | PathLike[str] | None" = None,
    **settings: Any,
) -> "Client":
    """Open the stores of a fleet.

    Connects to nothing: the first call does. Settings that are not given come from the TOML file
    and from ``OBJKV_*`` variables, as in replicas.

    Args:
        bulk_url: the bulk store, e.g. ``s3://bucket/prefix``.
        index_url: the index, e.g. ``rediss://host:6379/0``.
        config: a TOML file with settings, instead of ``OBJKV_CONFIG_FILE``.
        tokenizer: the model's folder or its ``tokenizer.json``, for prompts of text and messages.
            Loaded at the first such prompt.
        settings: other settings by name, e.g. ``role="reader"``.

    Raises ``ConfigError``.
    """
    given = {"bulk_url": bulk_url, "index_url": index_url}
    overrides = {name: value for name, value in given.items() if value is not None} | settings
    file = None if config is None else Path(config)
    resolved = resolve_config(overrides, file=file, origin="the arguments of objkv.open")
    return Client(resolved, open_backends(resolved.config, NullRecorder()), tokenizer)


class Matcher:
    """Which prefix of a prompt is stored. Thread-safe. Raises ``StoreError`` and ``ConfigError``.

    Names and identities are kept for half a minute. So a prompt that is stored whole costs one
    round trip; for any other, ``OtherShapesIndex`` reads one record more.
    """

    def __init__(
        self, bulk: ReadStore, index: ReadIndex, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._bulk, self._index, self._clock = bulk, index, clock
        self._lock = Lock()
        self._known: dict[str | None, tuple[float, tuple[str, Identity]]] = {}
        """By the name asked for, with the time until which it is used without another look."""

    def known(self, namespace: str | None) -> tuple[str, Identity]:
        """Return name and identity of the namespace called ``namespace``, or of the only one. They
        are read again after ``_KEEP_S``, by one thread while the others use the old ones, which
        stay if that fails with a ``StoreError``."""
        now, kept = self._clock(), self._known.get(namespace)
        # An end beyond the maximum means that the clock was set back meanwhile.
        if kept is not None and now < kept[0] <= now + _KEEP_S:
            return kept[1]
        if kept is None:
            found = self._find(namespace)
        elif self._lock.acquire(blocking=False):
            try:
                found = self._find(namespace)
            except StoreError:
                found = kept[1]
            finally:
                self._lock.release()
        else:
            return kept[1]
        self._known[namespace] = (now + _KEEP_S, found)
        return found

    def match(self, namespace: str | None, tokens: Sequence[int], extras: PromptExtras) -> Match:
        """Return the stored prefix of ``tokens`` in the namespace called ``namespace``."""
        name, identity = self.known(namespace)
        groups, size = identity.groups, identity.chunk_tokens
        hashes = prefix_hashes(name, tokens, size, extras)
        memory: dict[tuple[object, ...], bool] = {}

        def is_covered(shards: ShardRecords, number: int, group: GroupIdentity) -> bool:
            key = number, *shards  # most chunks have the same fields
            if (found := memory.get(key)) is None:
                found = memory[key] = covered(shards, number, group)
            return found

        def is_stored(shards: ShardRecords) -> bool:
            return all(is_covered(shards, number, group) for number, group in enumerate(groups))

        index = OtherShapesIndex(self._index, is_stored, again_s=0)
        fields = [str(number) for number in range(len(groups))]
        found = at_once(index.find(name, hashes, fields)) if hashes else []
        usable = usable_chunks(found, groups, size, is_covered)
        hot = sum([are_hot(shards) for shards in found[:usable] if shards is not None])
        return Match(
            namespace=name,
            model=identity.model,
            chunk_tokens=size,
            prompt_tokens=len(tokens),
            tokens=usable * size,
            hot_tokens=hot * size,
            chunks=usable,
            prompt_chunks=len(hashes),
            end=_end(found, usable),
        )

    def _find(self, namespace: str | None) -> tuple[str, Identity]:
        identity = find_identity(self._bulk, self._index, namespace)
        return identity.namespace(), identity


class Client:
    """The stores of a fleet, opened by ``objkv.open``. A context manager that closes them.

    Many threads may use one client. Every call waits a bounded time for a store, and raises a
    subclass of ``ObjkvError`` or nothing: ``ConfigError`` for wrong settings and arguments,
    ``StoreError`` for a store that fails or refuses.
    """

    def __init__(
        self,
        resolved: Resolved,
        backends: Backends,
        tokenizer: "str | PathLike[str] | None" = None,
    ) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._open: Backends | None = backends
        self._place = tokenizer
        self._tokenizer: LocalTokenizer | None = None
        self._lock = Lock()
        self._matcher = Matcher(backends.bulk, backends.index)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        public = self._config.public()
        return f"<objkv.Client of {public['bulk_url']} and {public['index_url']}>"

    def close(self) -> None:
        """Close the connections. Idempotent."""
        backends, self._open = self._open, None
        if backends is not None:
            backends.close()

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces of the bulk store.

        Takes one listing, and one get per namespace.
        """
        return [self._namespace(name) for name in stored_namespaces(self._backends.bulk)]

    def match(
        self,
        prompt: Prompt,
        *,
        namespace: str | None = None,
        cache_salt: str | None = None,
        lora_digest: str | None = None,
    ) -> Match:
        """Return which prefix of a prompt is stored.

        Usually takes one round trip to the index, and no payload is read. Names of namespaces are
        looked up again after half a minute.

        Args:
            prompt: token ids (fastest as a list or an ``array`` of type ``I``), text, chat
                messages, or a request of OpenAI's API as a dict. Text and messages need the
                ``tokenizer`` of ``objkv.open``.
            namespace: hex digits, ``MODEL``, ``TENANT/MODEL`` or any unambiguous beginning. Needed
                only if there are several namespaces.
            cache_salt: the ``cache_salt`` of the request, if it has one.
            lora_digest: the content digest of the request's adapter, in hex digits.

        Raises ``UnclearName`` with the choices if ``namespace`` fits none or several.
        """
        _ = self._backends  # raises after ``close``
        tokens, extras = self._read(prompt, cache_salt, lora_digest)
        return self._matcher.match(namespace, tokens, extras)

    def chunks(self, namespace: str | None = None) -> Iterator[Chunk]:
        """Return the chunks of one namespace or of all, in no order, as the index is read.

        Takes about 100 bytes of memory per chunk. Chunks that are saved or deleted meanwhile may be
        missing. ``pandas.DataFrame(client.chunks(), columns=[f.name for f in fields(Chunk)])`` is
        a table, also without chunks.
        """
        bulk, index = self._backends.bulk, self._backends.index
        if namespace is None:
            return _chunks(index, index.namespaces())
        return _chunks(index, [find_namespace(bulk, index, namespace)])

    def audit(
        self,
        namespace: str | None = None,
        *,
        on_progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
    ) -> AuditReport:
        """Compare the bulk store with the index, and report contents, owners, usage, cost and
        faults of one namespace or of all.

        Lists every payload and reads every record, which takes minutes for millions of chunks.
        Changes nothing, and reads no payload.

        Args:
            namespace: as for ``match``.
            on_progress: called with a stage's name, the number of its items that were begun, and
                the expected number of all, or None if it is unknown.
        """
        backends, config = self._backends, self._config
        from objkv import __version__  # late: objkv itself offers this module

        view = BackendsView.of(config, backends, "audit", open_seals(config))
        with closing(Inventory()) as inventory:
            only = None
            if namespace is not None:
                only = find_namespace(view.bulk, view.index, namespace)
            walk = Walk(view, inventory, find_scope(view, only), _WORKERS)
            pool = WorkPool(workers=_WORKERS)
            for stage, units in audit_stages(walk):
                pool.run(units, partial(on_progress, stage))
            if pool.ending != "complete":
                raise KeyboardInterrupt
            return make_report(
                walk,
                config,
                version=__version__,
                prices=audit_prices(self._resolved),
                lifecycle=partial(read_lifecycle, config),
            )

    def pin(
        self,
        prompt: Prompt | None = None,
        *,
        leaf: str | None = None,
        for_s: float = _WEEK_S,
        namespace: str | None = None,
        cache_salt: str | None = None,
        lora_digest: str | None = None,
    ) -> PinnedPrefix:
        """Protect a stored prefix from expiry and eviction.

        Replaces an earlier pin of the same prefix. Needs the role writer or sweeper.

        Args:
            prompt: the prompt whose stored prefix is pinned, as for ``match``.
            leaf: instead of a prompt, the prefix hash of the last chunk to pin.
            for_s: seconds until the pin ends.

        Raises ``NotStored`` if no chunk of the prompt would be served, or not every chunk up to
        ``leaf`` is stored.
        """
        if (prompt is None) == (leaf is None):
            raise ConfigError("give either a prompt or a leaf")
        if not math.isfinite(for_s):
            raise ConfigError(f"for_s is {for_s}: a pin must end")
        pinner = self._pinner()
        (name, identity), index = self._matcher.known(namespace), self._backends.index
        if leaf is not None:
            chain = chain_of(index, name, _hash(leaf))
        else:
            assert prompt is not None
            tokens, extras = self._read(prompt, cache_salt, lora_digest)
            chain = served_prefix(index, identity, tokens, extras)
            if not chain:
                raise NotStored(f"{name}: no chunk of this prompt would be served")
        return pinner.pin(name, chain, until_s=int(time.time() + for_s))

    def unpin(self, pin: PinnedPrefix | str, *, namespace: str | None = None) -> PinnedPrefix:
        """Remove a pin; normal expiry applies again. Needs the role sweeper.

        ``pin``: a result of ``pin`` or ``pins``, or its leaf. Raises ``NotStored`` if there is no
        such pin.
        """
        pinner = self._pinner()
        leaf = pin if isinstance(pin, str) else pin.leaf
        where = namespace if isinstance(pin, str) else pin.namespace
        name, _ = self._matcher.known(where)
        done = pinner.unpin(name, _hash(leaf))
        if done is None:
            raise NotStored(f"{name}: {leaf} is not pinned")
        return done

    def pins(self, namespace: str | None = None) -> list[PinnedPrefix]:
        """Return the pins of one namespace or of all, the next to end first."""
        backends = self._backends
        if namespace is None:
            names = stored_namespaces(backends.bulk)
        else:
            names = [self._matcher.known(namespace)[0]]
        found = list_pins(backends.bulk, backends.index, names, now_s=time.time())
        for problem in found.problems:
            logger.warning("a pin is unreadable reason=%s", problem)
        return list(found.pins)

    def warm(
        self,
        /,
        prompts: Iterable[Any],
        *,
        endpoints: Sequence[str] = (),
        model: str | None = None,
        check: bool = False,
        **options: Any,
    ) -> "WarmReport":
        """Compute and save ``prompts`` in advance, and wait until they are stored.

        Args:
            prompts: each one a text, a list of token ids, a request of OpenAI's API as a dict, or
                the ``Path`` of a file with one of these per line.
            endpoints: URLs of OpenAI-compatible servers with objkv's connector.
            model: a folder or hub id; ``vllm serve`` is started for it, and ended afterwards.
            check: only report which prompts are stored. Text needs ``endpoints``, which tokenize
                it.
            options: ``served_model``, the base model's name at the endpoints, if they serve
                several; their ``api_key``; ``at_once``, concurrent requests per endpoint;
                ``engine_arguments`` of ``vllm serve``, as ``--NAME`` or ``--NAME=VALUE``;
                ``namespace``, instead of the one that a test request finds; ``progress``, called
                with a ``WarmReport`` as prompts end, from another thread.

        ``report.is_complete`` is True if all of them are stored. An interruption ends the call, and
        the report states it.
        """
        from objkv.client.warming import run_warm  # late: a client of HTTP

        _ = self._backends  # raises after ``close``
        if unknown := options.keys() - set(getfullargspec(run_warm).kwonlyargs):
            raise ConfigError(f"warm has no option {', '.join(sorted(unknown))}")
        return run_warm(
            self._resolved, prompts, endpoints=endpoints, model=model, check=check, **options
        )

    @property
    def _backends(self) -> Backends:
        if self._open is None:
            raise ConfigError("the client is closed")
        return self._open

    def _namespace(self, name: str) -> Namespace:
        try:
            identity = read_identity(self._backends.bulk, name)
        except PayloadError as exc:
            return Namespace(name, problem=str(exc))
        if identity is None:
            return Namespace(name, problem="no identity document")
        return Namespace(
            name=name,
            model=identity.model,
            tenant=identity.tenant,
            kv_dtype=identity.kv_dtype,
            chunk_tokens=identity.chunk_tokens,
            weights_epoch=identity.weights_epoch,
        )

    def _read(
        self, prompt: Prompt, cache_salt: str | None, lora_digest: str | None
    ) -> tuple[Sequence[int], PromptExtras]:
        """Return a prompt's token ids, and what else names its KV."""
        try:
            digest = None if lora_digest is None else bytes.fromhex(lora_digest)
        except ValueError:
            raise ConfigError(f"lora_digest {lora_digest!r}: not hex digits") from None
        given: Any = prompt
        if hasattr(given, "tolist") and not isinstance(given, Sequence):
            given = given.tolist()  # from an array of numpy or torch
        if isinstance(given, Sequence) and not isinstance(given, str | bytes):
            if not given or not isinstance(given[0], Mapping):
                return encoded(given), PromptExtras(lora_digest=digest, salt=cache_salt)
            given = {"messages": given}
        one = to_prompt(given, "prompt")
        extras = PromptExtras(lora_digest=digest, salt=cache_salt or one.salt)
        if one.tokens is not None:
            return encoded(one.tokens), extras
        return encoded(self._loaded_tokenizer().tokenize(one)), extras

    def _loaded_tokenizer(self) -> LocalTokenizer:
        with self._lock:
            if self._tokenizer is None:
                if self._place is None:
                    raise ConfigError(
                        "text and messages need the model's tokenizer: give objkv.open "
                        "tokenizer=, the model's folder or its tokenizer.json, or use token ids, "
                        "which POST /tokenize of a server returns"
                    )
                self._tokenizer = LocalTokenizer(Path(self._place))
            return self._tokenizer

    def _pinner(self) -> Pinner:
        backends = self._backends
        return Pinner(backends.bulk, for_operators(backends.admin), self._config.ttl_s)


def _hash(leaf: str) -> bytes:
    try:
        found = bytes.fromhex(leaf)
    except ValueError:
        found = b""
    if len(found) != PREFIX_HASH_BYTES:
        raise ConfigError(f"{leaf!r} is not the prefix hash of a chunk, which has 40 hex digits")
    return found


def _chunks(index: ReadIndex, names: Iterable[str]) -> Iterator[Chunk]:
    for name in names:
        seen = set()
        for record in index.scan(name):
            if not record.shards or record.prefix_hash in seen:  # a scan may repeat records
                continue
            seen.add(record.prefix_hash)
            shards = record.shards.values()
            yield Chunk(
                namespace=name,
                prefix_hash=record.prefix_hash.hex(),
                parent_hash=record.parent_hash.hex(),
                token_start=record.token_start,
                token_end=record.token_end,
                payloads=len(shards),
                nbytes=record.nbytes,
                raw_bytes=sum(shard.raw_bytes for shard in shards),
                hot=all(shard.hot for shard in shards),
                hits=record.hits,
                created_s=max(shard.created_s for shard in shards),
                touched_s=record.touched_s,
                pinned_until_s=record.pinned_until_s,
            )


def encoded(tokens: Sequence[int]) -> "array[int]":
    """Return token ids in the form that is hashed fastest. Raises ``ConfigError``."""
    if isinstance(tokens, array) and tokens.typecode == "I":
        found = tokens
    else:
        found = array("I")
        try:
            found.fromlist(tokens if isinstance(tokens, list) else list(tokens))
        except (TypeError, ValueError, OverflowError) as exc:
            raise ConfigError(
                f"a prompt in token ids must be a sequence of integers below 2**32: {exc}"
            ) from None
    if not found:
        raise ConfigError("the prompt is empty (no token ids)")
    return found


def _end(found: Sequence[ShardRecords | None], usable: int) -> MatchEnd:
    if usable == len(found):
        return "complete" if found else "short"
    if found[usable]:
        return "incomplete"
    return "gap" if any(found[usable + 1 :]) else "missing"
