"""A bug in objkv costs a miss, not the engine; and its log lines reach vLLM's log."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def guarded(instead: R) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return ``instead``, and log the trace, where the wrapped method would raise.

    Only for methods where doing nothing is safe. Where it is not (a load that vLLM already counts
    on), the error must become a failed block further down.
    """

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception:  # the engine must live on whatever this is
                logger.exception("objkv failed, continuing without it method=%s", method.__name__)
                return instead

        return call

    return wrap


def speak_as_vllm() -> None:
    """Send objkv's log lines where vLLM's go, unless the application has decided otherwise."""
    ours, theirs = logging.getLogger("objkv"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.handlers = [_Named(handler) for handler in theirs.handlers]
    ours.setLevel(theirs.level)
    ours.propagate = False


class _Named(logging.Handler):
    """Prefixes objkv's lines with its name: vLLM's lines name only files."""

    def __init__(self, inner: logging.Handler) -> None:
        super().__init__(inner.level)
        self._inner = inner

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # arguments that cannot be formatted: reported as logging does
            self.handleError(record)
            return
        if not text.startswith("objkv"):
            record = copy.copy(record)
            record.msg, record.args = f"objkv: {text}", ()
        self._inner.handle(record)
