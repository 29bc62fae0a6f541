"""OpenTelemetry spans of one request. Without OpenTelemetry, every call does nothing.

OpenTelemetry's own variables configure the collector. vLLM's ``--otlp-traces-endpoint`` sets them
for its processes. Nothing here raises. Here a span is OpenTelemetry's, not a range of layers.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

Attribute = str | int | float | bool
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_END_S = 2.0
_ERROR_CHARS_MAX = 500


class Span:
    """An operation with a duration. Any thread may use it, not only the one that began it."""

    def __init__(self, span: Any = None) -> None:
        """``span``: OpenTelemetry's. None: disabled."""
        self._span = span
        self.is_on = span is not None
        """Whether the span will be exported."""

    def end(self, error: str | None = None, **attributes: Attribute) -> None:
        """End the span with its final attributes. Call it once."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        with _logged():
            self._span.set_attributes(_named(attributes))
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, error[:_ERROR_CHARS_MAX]))
            self._span.end(end_time=time.time_ns())


NO_SPAN = Span()


class Tracing:
    """Creates spans with an OpenTelemetry tracer, or disabled ones."""

    def __init__(self, tracer: "Tracer | None" = None, own: "TracerProvider | None" = None) -> None:
        """``own``: the provider to close, unless the process shares it."""
        self._tracer, self._own = tracer, own

    def begin(self, name: str, parent: str | None, **attributes: Attribute) -> Span:
        """Begin a span below ``parent``, a ``traceparent`` (W3C Trace Context), or a new trace."""
        if self._tracer is not None:
            from opentelemetry.context import Context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            with _logged():
                context = Context()  # empty: the thread's may belong to another request
                if parent is not None:
                    headers = {"traceparent": parent}
                    context = TraceContextTextMapPropagator().extract(headers, context)
                begun, named = time.time_ns(), _named(attributes)
                span = self._tracer.start_span(name, context, attributes=named, start_time=begun)
                return Span(span) if span.is_recording() else NO_SPAN
        return NO_SPAN

    def close(self) -> None:
        """Send pending spans within 2 s. Idempotent."""
        own, self._own = self._own, None
        if own is None:
            return
        # The SDK waits until the collector answers, even if it is given a timeout.
        end = _logged()(own.shutdown)
        thread = Thread(target=end, name="objkv-traces-end", daemon=True)
        with suppress(RuntimeError):  # the process may have no more threads, or is about to end
            thread.start()
            thread.join(_END_S)


NO_TRACING = Tracing()


@contextmanager
def _logged() -> Iterator[None]:
    """Log what OpenTelemetry raises, and go on."""
    try:
        yield
    except Exception as exc:
        logger.debug("span lost reason=%s", exc)


def _named(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    """Return attributes by OpenTelemetry's names; the request id is named as in vLLM's spans."""
    return {
        "gen_ai.request.id" if name == "request_id" else f"objkv.{name}": value
        for name, value in attributes.items()
    }


def open_tracing(environ: Mapping[str, str] = os.environ) -> Tracing:
    """Open tracing with the process's own provider, else with OpenTelemetry's variables. Without
    either, spans are disabled. An invalid configuration is logged once."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return NO_TRACING
    names = environ.get("OTEL_TRACES_EXPORTER", "otlp")
    wanted = names == "otlp" and any(environ.get(name) for name in _ENDPOINTS)
    if not wanted and "opentelemetry.sdk.trace" not in sys.modules:
        return NO_TRACING
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        shared = trace.get_tracer_provider()
        if isinstance(shared, TracerProvider):
            return Tracing(shared.get_tracer("objkv"))
        if not wanted:
            return NO_TRACING
        own = _provider(environ)
    except ImportError as exc:
        logger.warning("traces wanted but not sent, install objkv[otel] reason=%s", exc)
        return NO_TRACING
    except Exception as exc:  # a variable that the SDK does not accept
        logger.warning("traces wanted but not sent reason=%s", exc)
        return NO_TRACING
    return Tracing(own.get_tracer("objkv"), own)


def _provider(environ: Mapping[str, str]) -> "TracerProvider":
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "objkv"}))
    # ``Tracing.close`` shuts it down within a bound, so the process's exit must not wait for it.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(environ)))
    return provider


def _exporter(environ: Mapping[str, str]) -> Any:
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol != "http/protobuf":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL {protocol}: use grpc or http/protobuf")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpExporter,
    )

    return HttpExporter()
