"""What is replayed, and what is not. No engine runs here."""

import tempfile
from pathlib import Path

import pytest

from tests.engine import cache
from tests.engine.cache import Ledger, Values, scenario
from tests.engine.job import Result

RESULT = Result(
    outputs=(), answers=(1,), metrics={"m": 2.0}, warnings=(), log="", seconds={"total": 1.0}
)


@pytest.fixture(autouse=True)
def kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CACHE", tmp_path / "kept")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    new_process(monkeypatch)


def new_process(monkeypatch: pytest.MonkeyPatch, *, replay: bool = True) -> Ledger:
    ledger = Ledger(replay=replay)
    monkeypatch.setattr(cache, "LEDGER", ledger)
    return ledger


@scenario
def one_that_works(folder: Path, number: int = 0) -> Values:
    assert not list(folder.iterdir())
    return {"result": RESULT, "number": number}


@scenario
def one_that_logs(folder: Path) -> Values:
    (folder / "deep").mkdir()
    (folder / "deep" / "replica.log").touch()
    (folder / "deep" / "payload").touch()
    (folder / "empty").mkdir()
    return {}


@scenario
def one_that_fails(folder: Path) -> Values:
    raise ValueError(f"in {folder}")


def test_a_scenario_runs_once_and_is_replayed_by_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert one_that_works() == one_that_works() == {"result": RESULT, "number": 0}
    assert (cache.LEDGER.fresh, cache.LEDGER.replayed) == (1, 0)
    later = new_process(monkeypatch)
    assert one_that_works() == {"result": RESULT, "number": 0}
    assert (later.fresh, later.replayed) == (0, 1)


def test_other_arguments_make_another_scenario() -> None:
    assert [one_that_works(number)["number"] for number in (1, 2, 1)] == [1, 2, 1]
    assert cache.LEDGER.fresh == 2


def test_nothing_is_replayed_when_asked_for_fresh_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one_that_works()
    ledger = new_process(monkeypatch, replay=False)
    one_that_works()
    assert (ledger.fresh, ledger.replayed) == (1, 0)


@pytest.mark.parametrize("name", ["OBJKV_CODEC", "OBJKV_BULK_URL"])
def test_other_settings_in_the_environment_make_a_fresh_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_that_works()
    monkeypatch.setenv(name, "other")
    ledger = new_process(monkeypatch)
    one_that_works()
    assert (ledger.fresh, ledger.replayed) == (1, 0)


def test_a_failure_fails_each_of_its_tests_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="in "):
            one_that_fails()
    assert cache.LEDGER.fresh == 1
    new_process(monkeypatch)
    with pytest.raises(ValueError, match="in "):
        one_that_fails()
    assert cache.LEDGER.fresh == 1


def test_what_a_failed_test_saw_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    one_that_works()
    cache.LEDGER.forget(Path(__file__))
    ledger = new_process(monkeypatch)
    one_that_works()
    assert (ledger.fresh, ledger.replayed) == (1, 0)


def test_nothing_is_kept_of_a_file_in_which_a_test_has_failed() -> None:
    cache.LEDGER.forget(Path(__file__))
    one_that_works()
    assert not list(cache.CACHE.glob("*.json"))


@pytest.mark.parametrize("disliked", [False, True])
def test_of_what_a_test_did_not_like_the_logs_stay(tmp_path: Path, *, disliked: bool) -> None:
    one_that_logs()
    if disliked:
        cache.LEDGER.forget(Path(__file__))
    cache.LEDGER.sweep()
    left = [path.name for path in tmp_path.glob("objkv-*/**/*") if path.is_file()]
    assert left == (["replica.log"] if disliked else [])
    assert len(list(tmp_path.glob("objkv-*"))) == disliked
