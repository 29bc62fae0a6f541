"""Spans begin where the request's trace is, go where others go, and cost nothing unasked."""

import logging
import subprocess
import sys
import threading
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from objkv import tracing as tracing_module
from objkv.tracing import NO_SPAN, NO_TRACING, Tracing, open_tracing

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{ABOVE}-01"


def collected() -> tuple[Tracing, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider.get_tracer("objkv")), exporter


def test_a_span_belongs_to_the_trace_of_the_request() -> None:
    tracing, exporter = collected()
    load = tracing.begin("objkv.load", PARENT, request_id="r-1")
    load.end(bytes=100)
    (load_span,) = exporter.get_finished_spans()
    assert f"{load_span.context.trace_id:032x}" == TRACE
    assert load_span.parent is not None
    assert f"{load_span.parent.span_id:016x}" == ABOVE
    assert dict(load_span.attributes or {}) == {"gen_ai.request.id": "r-1", "objkv.bytes": 100}


@pytest.mark.parametrize("parent", [None, "", "nonsense", f"00-{'0' * 32}-{ABOVE}-01"])
def test_without_a_usable_parent_a_span_begins_a_trace_of_its_own(parent: str | None) -> None:
    tracing, exporter = collected()
    tracing.begin("objkv.lookup", parent).end()
    # What this thread is otherwise doing is no parent either.
    other = TracerProvider().get_tracer("another")
    with other.start_as_current_span("somebody else's"):
        tracing.begin("objkv.lookup", parent).end()
    assert [span.parent for span in exporter.get_finished_spans()] == [None, None]


def test_a_failure_is_told_in_a_sentence_of_bounded_length() -> None:
    tracing, exporter = collected()
    tracing.begin("objkv.get", None).end("x" * 10_000)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "x" * 500


def test_a_trace_that_is_not_sampled_has_no_spans_and_never_complains() -> None:
    tracing = Tracing(TracerProvider(sampler=ALWAYS_OFF).get_tracer("objkv"))
    assert tracing.begin("objkv.load", None) is NO_SPAN
    assert tracing.begin("objkv.load", f"00-{TRACE}-{ABOVE}-00") is NO_SPAN
    NO_SPAN.end("failed")
    assert not NO_SPAN.is_on


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_sent_unless_a_collector_is_named(environ: dict[str, str]) -> None:
    assert open_tracing(environ) is NO_TRACING


def test_a_protocol_that_is_not_known_is_told_and_nothing_else_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert open_tracing(variables | {"OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"}) is NO_TRACING
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "smoke" in caplog.text


def test_spans_go_where_the_process_sends_its_others(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    tracing = open_tracing({})
    tracing.begin("objkv.lookup", PARENT).end()
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "objkv"


QUIET = """
import sys
from objkv.tracing import NO_TRACING, open_tracing
assert open_tracing({}) is NO_TRACING
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
ABSENT = """
import sys, logging
logging.basicConfig(format="%(levelname)s %(message)s")
sys.modules["opentelemetry"] = None
from objkv.tracing import NO_TRACING, open_tracing
assert open_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is NO_TRACING
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stderr


def test_opentelemetry_is_not_even_imported_unless_it_is_wanted() -> None:
    assert run(QUIET) == ""


def test_traces_that_are_wanted_but_cannot_be_sent_are_told_once() -> None:
    told = run(ABSENT).splitlines()
    assert len(told) == 1
    assert told[0].startswith("WARNING traces wanted but not sent, install objkv[otel]")


class Broken(TracerProvider):
    """Its spans cannot be begun."""

    def get_tracer(self, *_: Any, **__: Any) -> Any:
        return self

    def start_span(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("out of order")


class BrokenSpan:
    """Begins, and then nothing works."""

    def is_recording(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("out of order")


def test_whatever_opentelemetry_raises_is_no_span_nor_is_a_parent_that_is_no_text() -> None:
    tracing = Tracing(Broken().get_tracer("objkv"))
    assert tracing.begin("objkv.load", None) is NO_SPAN
    assert tracing.begin("objkv.load", PARENT) is NO_SPAN
    tracing, exporter = collected()
    assert tracing.begin("objkv.load", PARENT.encode()) is NO_SPAN  # type: ignore[arg-type]
    assert exporter.get_finished_spans() == ()


def test_ends_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Broken().get_tracer("objkv")
    monkeypatch.setattr(tracer, "start_span", lambda *_, **__: BrokenSpan())
    span = Tracing(tracer).begin("objkv.load", None)
    assert span.is_on
    span.end("failed", bytes=1)


class HeldProvider(TracerProvider):
    """Sends to a collector that says nothing, until ``go``."""

    def __init__(self) -> None:
        super().__init__(shutdown_on_exit=False)
        self.go, self.has_ended = threading.Event(), threading.Event()

    def shutdown(self) -> None:
        self.go.wait(120)
        super().shutdown()
        self.has_ended.set()


def test_a_collector_that_says_nothing_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing_module, "_END_S", 0.01, raising=False)
    own = HeldProvider()
    tracing = Tracing(own.get_tracer("objkv"), own)
    tracing.close()
    tracing.close()
    assert not own.go.is_set()
    assert not own.has_ended.is_set()  # it is still trying, and nobody waits for it
    own.go.set()
    assert own.has_ended.wait(120)


def test_what_is_left_is_sent_at_the_end_and_its_thread_ends() -> None:
    exporter, own = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    own.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    tracing = Tracing(own.get_tracer("objkv"), own)
    tracing.begin("objkv.lookup", None).end()
    tracing.close()
    assert [span.name for span in exporter.get_finished_spans()] == ["objkv.lookup"]
    assert not [t for t in threading.enumerate() if t.name.startswith("OtelBatch")]
