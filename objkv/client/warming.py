"""Wires ``warm``: the engines or endpoints that compute, store and index. For the command and for
programs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from objkv.assembly.backends import open_backends
from objkv.config import Resolved, resolve_config
from objkv.errors import ConfigError
from objkv.keys.identity import name_model
from objkv.ops.backends_view import BackendsView
from objkv.ops.listing import find_identity
from objkv.ops.warm import endpoint, engine
from objkv.ops.warm.chat import LocalTokenizer
from objkv.ops.warm.endpoint import EndpointLimits, PrefillEndpoint
from objkv.ops.warm.engine import EngineProcess, WarmEngineJob
from objkv.ops.warm.prefill import Prefiller
from objkv.ops.warm.prompts import WarmPrompt, read_prompts, to_prompt
from objkv.ops.warm.report import WarmReport
from objkv.ops.warm.run import WarmLimits
from objkv.ops.warm.warm import Means, WarmProgress, check_stored, warm_by
from objkv.telemetry import NullRecorder

_ENGINE = "objkv.programs.warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions:
    """The way to compute, with its options: one of ``endpoints``, ``model``, ``llm``, ``check``."""

    endpoints: Sequence[str] = ()
    model: str | None = None
    """A folder or a hub id; a separate engine is started for it."""
    llm: Any = None
    """A ``vllm.LLM`` with objkv's connector, in this process."""
    check: bool = False
    """Report which prompts are stored, without computing."""
    served_model: str | None = None
    """The base model's name at the endpoints, if they serve several."""
    api_key: str | None = field(default=None, repr=False)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | str | None = None
    namespace: str | None = None
    """A namespace or its prefix; detected by default."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """By name: an adapter's folder, or the digest of its content."""
    at_once: int | None = None
    """Concurrent requests per endpoint or engine."""
    answer_s: float = 600.0
    patience: WarmLimits = field(default_factory=WarmLimits)


def warm(
    prompts: Iterable[Any],
    *,
    config: Mapping[str, Any] | None = None,
    endpoints: Sequence[str] = (),
    model: str | None = None,
    llm: Any = None,
    check: bool = False,
    **options: Any,
) -> WarmReport:
    """Compute and save ``prompts`` in advance. Waits until they are stored.

    Args:
        prompts: each one a text, a list of token ids, a request of OpenAI's API as a dict, or the
            ``Path`` of a file with one of these per line.
        config: settings by name, in addition to those of the environment.
        endpoints: URLs of OpenAI-compatible servers with objkv's connector.
        model: a folder or hub id; a separate engine computes, in a child process.
        llm: a ``vllm.LLM`` with objkv's connector, without other users meanwhile.
        check: only report which prompts are stored.
        options: see ``WarmOptions``.

    ``report.is_complete`` is True if all of them are stored. Raises ``ConfigError`` and
    ``StoreError``. An interruption ends the call, and the report states it.
    """
    chosen = WarmOptions(endpoints=endpoints, model=model, llm=llm, check=check, **options)
    return warm_prompts(resolve_config(dict(config or {})), prompts, chosen)


def warm_prompts(resolved: Resolved, prompts: Iterable[Any], options: WarmOptions) -> WarmReport:
    """Warm ``prompts`` in any of the forms that ``warm`` takes."""
    if isinstance(prompts, str | bytes | Mapping):
        raise ConfigError("prompts must be a list of prompts, not a single one")
    return run_warm(resolved, _given(prompts), options)


def run_warm(
    resolved: Resolved,
    prompts: Iterable[WarmPrompt],
    options: WarmOptions,
    watch: WarmProgress | None = None,
) -> WarmReport:
    """Implement ``warm``."""
    config, watch = resolved.config, watch or WarmProgress()
    modes = [bool(options.endpoints), options.model is not None, options.llm is not None]
    if sum(modes) + options.check != 1:
        raise ConfigError(
            "choose how to compute: an endpoint, or a model to start an engine; or check, which "
            "does not compute"
        )
    digests = {name: _digest(name, value) for name, value in options.adapters.items()}
    with ExitStack() as stack:
        backends = stack.enter_context(open_backends(config, NullRecorder()))
        backends.bulk.check()
        backends.index.check()
        view = BackendsView.of(
            config, (backends.bulk, backends.hot), backends.index, backends.admin, command="warm"
        )
        if options.check:
            means = Means(view, digests, _tokenizer(options), None, watch, _base(options))
            identity = find_identity(view.bulk, view.index, options.namespace)
            return check_stored(means, prompts, identity)
        askers = _askers(resolved, options)
        for asker in askers:
            stack.enter_context(closing(asker))
        is_named = options.namespace is not None
        identity_of = (
            partial(find_identity, view.bulk, view.index, options.namespace) if is_named else None
        )
        means = Means(view, digests, _tokenizer(options), identity_of, watch, _base(options))
        return warm_by(means, askers, prompts, options.patience)


def _given(prompts: Iterable[Any]) -> Iterable[WarmPrompt]:
    for number, value in enumerate(prompts):
        if isinstance(value, WarmPrompt):
            yield value
        elif isinstance(value, Path):
            yield from read_prompts([str(value)])
        else:
            # Arrays are converted to lists.
            yield to_prompt(getattr(value, "tolist", lambda v=value: v)(), f"prompt {number}")


def _askers(resolved: Resolved, options: WarmOptions) -> list[Prefiller]:
    if options.llm is not None:
        folders = {name: path for name, path in options.adapters.items() if Path(path).is_dir()}
        asker: Prefiller = import_module(_ENGINE).LlmAsker(
            options.llm, adapters=folders, at_once=options.at_once or engine.AT_ONCE
        )
        return [asker]
    if options.model is not None:
        job = WarmEngineJob(
            options.model,
            options.engine_arguments,
            {name: _folder(name, path) for name, path in options.adapters.items()},
            tokenizes=options.tokenizer is None,
            at_once=options.at_once or engine.AT_ONCE,
        )
        return [EngineProcess(job, _environment(resolved))]
    limits = EndpointLimits(options.at_once or endpoint.AT_ONCE, options.answer_s)
    urls = list(dict.fromkeys(options.endpoints))
    return [
        PrefillEndpoint(
            url,
            limits,
            model=options.served_model,
            api_key=options.api_key,
            allow_plaintext=resolved.config.allow_plaintext,
        )
        for url in urls
    ]


def _environment(resolved: Resolved) -> dict[str, str]:
    """Return the settings that differ from the defaults, as environment variables for another
    process."""
    values = resolved.config.model_dump(mode="json")
    given = (name for name, source in resolved.sources.items() if source != "default")
    passed = {name: values[name] for name in given if values[name] is not None}
    # Always include both URLs, whatever their source.
    passed |= {name: values[name] for name in ("bulk_url", "index_url", "quota_bytes")}
    passed.setdefault("agent", "private")  # it ends with the engine
    return {f"OBJKV_{name.upper()}": str(value) for name, value in passed.items()}


def _base(options: WarmOptions) -> frozenset[str]:
    """Return the names of the base model, for endpoints that do not report them."""
    names = {options.served_model, options.model}
    if options.model is not None:
        names.add(Path(name_model(options.model, None)).name)
    return frozenset(name for name in names if name is not None)


def _tokenizer(options: WarmOptions) -> LocalTokenizer | None:
    return None if options.tokenizer is None else LocalTokenizer(Path(options.tokenizer))


def _digest(name: str, value: str) -> bytes:
    folder = Path(value)
    if folder.is_dir():
        digest: bytes | None = import_module(_ENGINE).adapter_content(folder)
        if digest is None:
            raise ConfigError(f"adapter {name}: {value} has no weights")
        return digest
    try:
        digest = bytes.fromhex(value)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(
            f"adapter {name}: {value} is neither a folder nor a digest of 64 hex digits"
        )
    return digest


def _folder(name: str, path: str) -> str:
    if not Path(path).is_dir():
        raise ConfigError(f"adapter {name}: --model needs the adapter's folder, not its digest")
    return path
