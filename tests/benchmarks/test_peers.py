"""Peers are asked in turn, held to the bytes that were put, and outlived when they hang."""

from pathlib import Path

import pytest

from benchmarks.peers.contest import RESTARTS_MAX, Contest, Options, Result, Row
from benchmarks.peers.crew import ENTRANTS, ROOT, Entrant
from benchmarks.peers.run import chosen, markdown

FAKE = Path(__file__).with_name("fake_worker.py")
ROUNDS = 2


def entrant(name: str, fault: str = "", rival: str | None = "ours") -> Entrant:
    return Entrant(name, (str(FAKE), fault), rival=rival)


def contest(
    folder: Path, *peers: Entrant, rounds: int = ROUNDS, timeout_s: float = 60.0
) -> tuple[Result, list[str]]:
    cleared: list[str] = []
    told: list[str] = []
    options = Options(((4096, 3),), rounds=rounds, threads=1, timeout_s=timeout_s)
    servers = {"redis_port": 0, "s3_port": 0, "bucket": "b", "folder": str(folder)}
    run = Contest(servers, options, clear=lambda: cleared.append("x"), told=told.append)
    result = run.run([entrant("ours", rival=None), *peers])
    assert cleared
    return result, told


def test_everybody_takes_turns_on_the_same_work(tmp_path: Path) -> None:
    result, told = contest(tmp_path, entrant("peer"))
    turns = [text.partition(":")[0] for text in told if "round" in text]
    assert turns == ["ours", "peer"] * (ROUNDS + 1) * 2
    assert [(row.entrant, row.what) for row in result.rows] == [
        ("ours", "put, 0.00390625 MiB"),
        ("ours", "get, 0.00390625 MiB"),
        ("peer", "put, 0.00390625 MiB"),
        ("peer", "get, 0.00390625 MiB"),
        ("ours", "lookup of 128 chunks"),
        ("peer", "lookup of 128 chunks"),
    ]
    assert all(len(row.good()) == ROUNDS for row in result.rows)
    assert (result.out, result.failures) == ({}, [])


def test_the_ratio_is_of_the_same_rounds() -> None:
    result = Result([], {}, [])
    ours = Row("ours", None, "put", 1_000_000, [1.0, 1.0, 4.0])
    peer = Row("peer", "ours", "put", 1_000_000, [2.0, None, 12.0])
    result.rows = [ours, peer]
    assert result.ratio(peer) == 2.5
    assert result.ratio(ours) is None
    assert peer.median() == pytest.approx(1.0 / 7.0)
    cells = [line for line in markdown(result, "machine").splitlines() if "peer" in line]
    assert cells == ["| put | peer | 0 MB/s | 2/3 | 2.50 |"]


@pytest.mark.parametrize("fault", ["lies", "fails"])
def test_a_round_that_went_wrong_gives_no_figure(tmp_path: Path, fault: str) -> None:
    result, _ = contest(tmp_path, entrant("peer", fault))
    rows = {row.what[:3]: row for row in result.rows if row.entrant == "peer"}
    assert rows["get"].seconds == [None] * ROUNDS
    assert len(rows["put"].good()) == len(rows["loo"].good()) == ROUNDS
    assert len(result.failures) == ROUNDS + 1
    assert "peer" not in result.out


@pytest.mark.parametrize("fault", ["hangs", "dies"])
def test_a_peer_that_always_hangs_or_dies_is_out_and_the_others_go_on(
    tmp_path: Path, fault: str
) -> None:
    result, _ = contest(tmp_path, entrant("peer", fault), rounds=RESTARTS_MAX, timeout_s=2.0)
    assert "get" in result.out["peer"]
    assert len(result.failures) == RESTARTS_MAX + 1
    ours = [row for row in result.rows if row.entrant == "ours"]
    assert len(ours) == 3
    assert all(len(row.good()) == RESTARTS_MAX for row in ours)


def test_a_peer_that_died_once_is_started_again(tmp_path: Path) -> None:
    result, _ = contest(tmp_path, entrant("peer", "dies once"))
    assert result.out == {}
    assert len(result.failures) == 1
    assert all(len(row.good()) == ROUNDS for row in result.rows)


def test_a_peer_that_is_not_set_up_is_named_with_what_to_run(tmp_path: Path) -> None:
    absent = Entrant("peer", (str(FAKE), ""), "no-such-environment", "ours")
    result, _ = contest(tmp_path, absent)
    assert result.out == {"peer": "not set up: run benchmarks/peers/setup.sh no-such-environment"}


def test_a_peer_brings_its_rival_along() -> None:
    names = [entrant.name for entrant in chosen(["lmcache-resp"])]
    assert names == ["objkv-redis", "lmcache-resp"]
    assert chosen([]) == list(ENTRANTS)


def test_every_peer_has_a_worker_and_a_way_to_set_it_up() -> None:
    setup = (ROOT / "benchmarks" / "peers" / "setup.sh").read_text()
    for one in ENTRANTS:
        assert (ROOT / "benchmarks" / "peers" / one.command[0]).exists()
        assert one.environment is None or f"{one.environment})" in setup
