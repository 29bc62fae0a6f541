"""Wires ``warm``: the endpoints that compute, store and index. For the command and for programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from objkv.assembly.backends import open_backends
from objkv.config import Resolved
from objkv.errors import ConfigError
from objkv.ops.backends_view import BackendsView
from objkv.ops.listing import find_identity
from objkv.ops.warm import server
from objkv.ops.warm.endpoint import Endpoint
from objkv.ops.warm.prompts import WarmPrompt, read_prompts, to_prompt
from objkv.ops.warm.report import WarmLimits, WarmReport
from objkv.ops.warm.run import WarmJob, warm_by
from objkv.telemetry import NullRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmOptions:
    """The way to compute, with its options: ``endpoints``, ``model``, or none with ``check``."""

    endpoints: Sequence[str] = ()
    model: str | None = None
    """A folder or a hub id; ``vllm serve`` is started for it."""
    check: bool = False
    """Report which prompts are stored: no server is started, and ``endpoints`` only tokenize."""
    served_model: str | None = None
    """The base model's name at the endpoints, if they serve several."""
    api_key: str | None = field(default=None, repr=False)
    engine_arguments: Sequence[str] = ()
    """Further arguments of ``vllm serve``, as ``--NAME`` or ``--NAME=VALUE``."""
    namespace: str | None = None
    """A namespace or its prefix; detected by default."""
    at_once: int | None = None
    """Concurrent requests per endpoint."""


def run_warm(
    resolved: Resolved,
    prompts: Iterable[Any],
    options: WarmOptions,
    progress: Callable[[WarmReport], None] = lambda report: None,
) -> WarmReport:
    """Warm ``prompts`` in any of the forms that ``Client.warm`` takes, or ``WarmPrompt``."""
    if isinstance(prompts, str | bytes | Mapping):
        raise ConfigError("prompts must be a list of prompts, not a single one")
    config = resolved.config
    if bool(options.endpoints) + (options.model is not None) != 1 and not options.check:
        raise ConfigError(
            "choose how to compute: an endpoint, or a model to start a server; or check, which "
            "does not compute"
        )
    with ExitStack() as stack:
        backends = stack.enter_context(open_backends(config, NullRecorder()))
        backends.bulk.check()
        backends.index.check()
        view = BackendsView.of(
            config, (backends.bulk, backends.hot), backends.index, backends.admin, command="warm"
        )
        identity = None
        if options.check or options.namespace is not None:
            identity = find_identity(view.bulk, view.index, options.namespace)
        mode = "check" if options.check else "model" if options.model else "endpoints"
        if mode == "model":
            socket = stack.enter_context(
                server.serving(str(options.model), _environment(resolved), options.engine_arguments)
            )
            at_once = options.at_once or server.AT_ONCE
            endpoints = [Endpoint("http://localhost", at_once=at_once, socket=socket)]
        else:
            endpoints = [
                Endpoint(
                    url,
                    at_once=options.at_once or 8,
                    model=options.served_model,
                    api_key=options.api_key,
                    allow_plaintext=config.may_be_clear("endpoints"),
                )
                for url in dict.fromkeys(options.endpoints)
            ]
        # Replicas give a save up after their deadline, so waiting any longer is of no use.
        limits = WarmLimits(save_s=max(WarmLimits().save_s, config.save_deadline_ms / 1000))
        job = WarmJob(view, endpoints, identity, limits, progress)
        return warm_by(job, _given(prompts), mode)


def _given(prompts: Iterable[Any]) -> Iterable[WarmPrompt]:
    for number, value in enumerate(prompts):
        if isinstance(value, WarmPrompt):
            yield value
        elif isinstance(value, Path):
            yield from read_prompts([str(value)])
        else:
            # Arrays are converted to lists.
            yield to_prompt(getattr(value, "tolist", lambda v=value: v)(), f"prompt {number}")


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
