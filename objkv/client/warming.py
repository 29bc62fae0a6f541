"""Wires ``warm``: the endpoints that compute, store and index. For the command and for programs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
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
from objkv.ops.warm.run import WarmJob, WarmLimits, WarmReport, warm_by
from objkv.telemetry import NullRecorder


def run_warm(
    resolved: Resolved,
    prompts: Iterable[Any],
    *,
    endpoints: Sequence[str] = (),
    model: str | None = None,
    check: bool = False,
    served_model: str | None = None,
    api_key: str | None = None,
    engine_arguments: Sequence[str] = (),
    namespace: str | None = None,
    at_once: int | None = None,
    progress: Callable[[WarmReport], None] = lambda report: None,
) -> WarmReport:
    """Warm ``prompts``, also ``WarmPrompt``. For all else see ``Client.warm``."""
    if isinstance(prompts, str | bytes | Mapping):
        raise ConfigError("prompts must be a list of prompts, not a single one")
    if bool(endpoints) + (model is not None) != 1 and not check:
        raise ConfigError(
            "choose how to compute: an endpoint (--endpoint URL), or a model to start a server "
            "(--model MODEL); or check (--check), which does not compute"
        )
    settings = resolved.config
    with ExitStack() as stack:
        backends = stack.enter_context(open_backends(settings, NullRecorder()))
        backends.bulk.check()
        backends.index.check()
        view = BackendsView.of(settings, backends, "warm")
        identity = None
        if check or namespace is not None:
            identity = find_identity(view.bulk, view.index, namespace)
        mode = "check" if check else "model" if model else "endpoints"
        if mode == "model":
            serving = server.serving(str(model), _environment(resolved), engine_arguments)
            socket, many = stack.enter_context(serving), at_once or server.AT_ONCE
            used = [Endpoint("http://localhost", at_once=many, socket=socket)]
        else:
            clear, few = settings.may_be_clear("endpoints"), at_once or 8
            used = [
                Endpoint(
                    url, at_once=few, model=served_model, api_key=api_key, allow_plaintext=clear
                )
                for url in dict.fromkeys(endpoints)
            ]
        # Replicas give a save up after their deadline, so waiting any longer is of no use.
        limits = WarmLimits(save_s=max(WarmLimits().save_s, settings.save_deadline_ms / 1000))
        return warm_by(WarmJob(view, used, identity, limits, progress), _given(prompts), mode)


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
    """Return the settings that are given, as environment variables for another process."""
    values = resolved.config.model_dump(mode="json")
    given = (name for name, source in resolved.sources.items() if source != "default")
    passed = {name: values[name] for name in given if values[name] is not None}
    # Always include both URLs, whatever their source.
    passed |= {name: values[name] for name in ("bulk_url", "index_url", "quota_bytes")}
    passed.setdefault("agent", "private")  # it ends with the engine
    return {f"OBJKV_{name.upper()}": str(value) for name, value in passed.items()}
