"""Keeps bugs in objkv from stopping the engine, and sends its log lines to vLLM's log."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from objkv.errors import ObjkvError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def guarded(instead: S) -> Callable[[Callable[P, R]], Callable[P, R | S]]:
    """Wrap a method so that it logs any exception and returns ``instead``. Only for methods that
    may safely do nothing: a load on which vLLM already relies must become a failed one."""

    def wrap(method: Callable[P, R]) -> Callable[P, R | S]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | S:
            try:
                return method(*args, **kwargs)
            except Exception:  # no error of objkv may stop the engine
                logger.exception("objkv failed, continuing without it method=%s", method.__name__)
                return instead

        return call

    return wrap


def starts(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a step of the start, so that the last line that objkv logs says why it failed: vLLM
    shows a traceback after it, and those of other processes."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except ObjkvError as exc:
            logger.error("objkv cannot start: %s", exc)
            raise exc from None  # the sentence has what its causes say

    return call


def log_through_vllm() -> None:
    """Send objkv's log lines to vLLM's handlers, unless the application has configured others."""
    ours, theirs = logging.getLogger("objkv"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.handlers = [_Named(handler) for handler in theirs.handlers]
    ours.setLevel(theirs.level)
    ours.propagate = False


class _Named(logging.Handler):
    """Prefixes objkv's lines with its name, because vLLM's lines show only file names."""

    def __init__(self, inner: logging.Handler) -> None:
        super().__init__(inner.level)
        self._inner = inner

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except Exception:  # the arguments do not fit the format: report it as logging does
            self.handleError(record)
            return
        if not text.startswith("objkv"):
            record = copy.copy(record)
            record.msg, record.args = f"objkv: {text}", ()
        self._inner.handle(record)
