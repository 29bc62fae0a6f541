"""``objkv.ops.top.scrape``: one look at one endpoint."""

from collections.abc import Iterator

import httpx
import pytest

from objkv.ops.top import scrape as scrape_module
from objkv.ops.top.scrape import MetricsSource, values_of

TEXT = """\
# TYPE vllm:objkv_hit_tokens_total counter
vllm:objkv_hit_tokens_total{engine="0",model_name="m"} 3.0
vllm:objkv_hit_tokens_total{engine="1",model_name="m"} 4.0
# TYPE vllm:objkv_lookup_seconds histogram
vllm:objkv_lookup_seconds_bucket{le="+Inf"} 5.0
vllm:objkv_lookup_seconds_sum 0.25
vllm:objkv_lookup_seconds_count 5.0
# TYPE objkv_up gauge
objkv_up{end="bulk"} 1.0
objkv_up{end="index"} 0.0
# TYPE odd gauge
odd NaN
"""


def source_that(answer: httpx.Response | Exception, **settings: float) -> MetricsSource:
    def handler(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return MetricsSource(
        "http://user:hidden@replica:8000",
        deadline_s=settings.get("deadline_s", 1.0),
        clock=lambda: 7.0,
        transport=httpx.MockTransport(handler),
    )


def test_what_is_no_number_is_left_out() -> None:
    assert values_of("a_total NaN\nb +Inf\nc -Inf\nd 1\n") == {"d": 1}


def test_values_are_summed_over_engines() -> None:
    values = values_of(TEXT)
    assert values["vllm_objkv_hit_tokens_total"] == 7
    assert (values["vllm_objkv_lookup_seconds_sum"], values["vllm_objkv_lookup_seconds_count"]) == (
        0.25,
        5,
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(404, text="no"), "HTTP 404"),
        (httpx.Response(302, headers={"location": "http://elsewhere"}), "HTTP 302"),
        (httpx.Response(200, text="<html> }{"), "no metrics"),
        (httpx.Response(200, content=b"\xff\xfe"), "no metrics"),
        (httpx.Response(200, text="# TYPE \u2028 counter\n"), "no metrics"),
        (httpx.ConnectError("refused"), "refused"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "Name or service"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (httpx.RemoteProtocolError("http://user:hidden@x broke"), "broke"),
    ],
)
def test_what_goes_wrong_is_a_sentence_and_no_values(
    answer: httpx.Response | Exception, words: str
) -> None:
    found = source_that(answer).scrape()
    assert not found.values
    assert found.problem is not None
    assert words in found.problem
    assert "hidden" not in found.problem
    assert "Errno" not in found.problem


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_module, "ANSWER_BYTES_MAX", 1 << 20)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"# " + b"x" * 65_536 + b"\n"

    found = source_that(httpx.Response(200, content=endless())).scrape()
    assert found.problem == "no metrics: more than 1 MiB"
