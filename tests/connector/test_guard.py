"""In vLLM's log every line of objkv is found by its name."""

import io
import logging
from collections.abc import Iterator

import pytest

from objkv.connector.guard import log_through_vllm, starts
from objkv.errors import ConfigError, StoreDenied


@pytest.fixture
def vllm_log() -> Iterator[io.StringIO]:
    """What vLLM's only handler writes; objkv has decided nothing yet."""
    ours, theirs = logging.getLogger("objkv"), logging.getLogger("vllm")
    before = [(log, log.handlers, log.level, log.propagate) for log in (ours, theirs)]
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    ours.handlers, theirs.handlers = [], [handler]
    ours.propagate = True  # pytest listens at each logger that keeps its records to itself
    theirs.setLevel(logging.INFO)
    yield written
    for log, handlers, level, propagate in before:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def test_every_line_names_objkv_once(vllm_log: io.StringIO) -> None:
    log_through_vllm()
    log_through_vllm()
    logger = logging.getLogger("objkv.telemetry")
    logger.warning("index keeps failing, serving without it after=%d", 5)
    logger.info("objkv ready namespace=%s", "ab")
    logger.debug("not as loud as vLLM")
    assert vllm_log.getvalue().splitlines() == [
        "WARNING [test_guard.py] objkv: index keeps failing, serving without it after=5",
        "INFO [test_guard.py] objkv ready namespace=ab",
    ]


def test_a_line_that_cannot_be_written_raises_nothing_into_the_engine(
    vllm_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)  # which prints, and nothing else
    log_through_vllm()
    logging.getLogger("objkv.transfer").warning("chunks=%d", "several")
    assert vllm_log.getvalue() == ""


def test_what_the_application_decided_stays(vllm_log: io.StringIO) -> None:
    own = logging.NullHandler()
    logging.getLogger("objkv").handlers = [own]
    log_through_vllm()
    assert logging.getLogger("objkv").handlers == [own]


def test_a_start_that_fails_ends_with_the_sentence(vllm_log: io.StringIO) -> None:
    @starts
    def start() -> None:
        try:
            raise StoreDenied("WRONGPASS")
        except StoreDenied as exc:
            raise ConfigError(f"index: {exc}: check redis_password") from exc

    log_through_vllm()
    with pytest.raises(ConfigError, match="check redis_password") as caught:
        start()
    assert caught.value.__suppress_context__, "the sentence is the whole story"
    [line] = vllm_log.getvalue().splitlines()
    assert line.endswith("objkv cannot start: index: WRONGPASS: check redis_password")
