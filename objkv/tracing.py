"""OpenTelemetry spans of one request; without OpenTelemetry, nothing.

The collector is configured by OpenTelemetry's own variables, or by vLLM's
``--otlp-traces-endpoint``, which sets them for its processes. Nothing here raises, and a span that
is off costs a call that returns at once. Spans are OpenTelemetry's, not layers.
"""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

Attribute = str | int | float | bool
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TRUE = "true"
_END_S = 2.0
_ERROR_CHARS_MAX = 500


class Span(Protocol):
    """An operation with a duration. Another thread than the one that began it may use it."""

    @property
    def is_on(self) -> bool:
        """Whether it will be exported."""

    def child(self, name: str, **attributes: Attribute) -> "Span":
        """Begin a part of it."""

    def part(self, name: str, begun_ns: int, ended_ns: int, **attributes: Attribute) -> None:
        """Add a finished part; times of ``now_ns``."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """End it, with its final attributes. Once."""


class NoSpan:
    """A span that is off."""

    is_on = False

    def child(self, name: str, **attributes: Attribute) -> Self:
        """Itself."""
        return self

    def part(self, name: str, begun_ns: int, ended_ns: int, **attributes: Attribute) -> None:
        """Nothing."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """Nothing."""


NO_SPAN = NoSpan()


class Tracing(Protocol):
    """Where spans begin."""

    def begin(self, name: str, parent: str | None, **attributes: Attribute) -> Span:
        """Begin a span below ``parent``, the ``traceparent`` of W3C's Trace Context that came with
        the request; a trace of its own for None."""

    def close(self) -> None:
        """Send pending spans, within 2 s. Idempotent."""


class NoTracing:
    """No collector is configured."""

    def begin(self, name: str, parent: str | None, **attributes: Attribute) -> Span:
        """No span."""
        return NO_SPAN

    def close(self) -> None:
        """Nothing."""


NO_TRACING = NoTracing()


def now_ns() -> int:
    """The clock of spans."""
    return time.time_ns()


class OtelTracing:
    """Spans by an OpenTelemetry tracer."""

    def __init__(self, tracer: "Tracer", own: "TracerProvider | None" = None) -> None:
        """``own``: the provider to close, if it is not shared."""
        self._tracer = tracer
        self._own = own

    def begin(self, name: str, parent: str | None, **attributes: Attribute) -> Span:
        """See ``Tracing``."""
        from opentelemetry.context import Context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # An empty context, not the thread's, which is of another request.
        context = Context()
        try:
            if parent is not None:
                headers = {"traceparent": parent}
                context = TraceContextTextMapPropagator().extract(headers, context)
            return _begun(self._tracer, name, context, attributes)
        except Exception as exc:
            logger.debug("span lost reason=%s", exc)
            return NO_SPAN

    def close(self) -> None:
        """See ``Tracing``."""
        own, self._own = self._own, None
        if own is None:
            return
        # The SDK waits as long as the collector takes, whatever bound it is given.
        thread = Thread(target=_shut_down, args=(own,), name="objkv-traces-end", daemon=True)
        with suppress(RuntimeError):  # the process may have no more threads, or is about to end
            thread.start()
            thread.join(_END_S)


class _OtelSpan:
    def __init__(self, tracer: "Tracer", span: Any) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def is_on(self) -> bool:
        return True

    def child(self, name: str, **attributes: Attribute) -> Span:
        try:
            return _begun(self._tracer, name, self._context(), attributes)
        except Exception as exc:
            logger.debug("span lost reason=%s", exc)
            return NO_SPAN

    def part(self, name: str, begun_ns: int, ended_ns: int, **attributes: Attribute) -> None:
        try:
            span = self._tracer.start_span(
                name, self._context(), attributes=_named(attributes), start_time=begun_ns
            )
            span.end(end_time=max(begun_ns, ended_ns))
        except Exception as exc:
            logger.debug("span lost reason=%s", exc)

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        from opentelemetry.trace import Status, StatusCode

        try:
            self._span.set_attributes(_named(attributes))
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, error[:_ERROR_CHARS_MAX]))
            self._span.end(end_time=now_ns())
        except Exception as exc:
            logger.debug("span lost reason=%s", exc)

    def _context(self) -> Any:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(self._span, Context())


def _shut_down(provider: "TracerProvider") -> None:
    """Send pending spans, and end the provider's thread."""
    try:
        provider.shutdown()
    except Exception as exc:
        logger.debug("traces not ended reason=%s", exc)


def _begun(tracer: "Tracer", name: str, context: Any, attributes: Mapping[str, Attribute]) -> Span:
    span = tracer.start_span(name, context, attributes=_named(attributes), start_time=now_ns())
    # One that is not sampled has no parts either.
    return _OtelSpan(tracer, span) if span.is_recording() else NO_SPAN


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Names in OpenTelemetry's form; the request's is the one in vLLM's own spans."""
    return {
        "gen_ai.request.id" if name == "request_id" else f"objkv.{name}": value
        for name, value in attributes.items()
    }


def open_tracing(environ: Mapping[str, str] = os.environ) -> Tracing:
    """Spans go to the process's own provider, if it has one; else where OpenTelemetry's variables
    say; else nowhere. A configuration that does not work is logged once."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == _TRUE:
        return NO_TRACING
    names = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    wanted = names == "otlp" and any(environ.get(name) for name in _ENDPOINTS)
    if not wanted and not _is_imported():
        return NO_TRACING
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        shared = trace.get_tracer_provider()
        if isinstance(shared, TracerProvider):
            return OtelTracing(shared.get_tracer("objkv"))
        if not wanted:
            return NO_TRACING
        own = _provider(environ)
    except ImportError as exc:
        logger.warning("traces wanted but not sent, install objkv[otel] reason=%s", exc)
        return NO_TRACING
    except Exception as exc:  # a variable that the SDK does not accept
        logger.warning("traces wanted but not sent reason=%s", exc)
        return NO_TRACING
    return OtelTracing(own.get_tracer("objkv"), own)


def _is_imported() -> bool:
    import sys

    return "opentelemetry.sdk.trace" in sys.modules


def _provider(environ: Mapping[str, str]) -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "objkv"}))
    # Its owner closes it, within a bound; the end of the process does not wait for it.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(environ)))
    return provider


def _exporter(environ: Mapping[str, str]) -> Any:
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol}: grpc or http/protobuf is known")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter()
