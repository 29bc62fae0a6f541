"""Peers are asked in turn and held to the bytes that were put."""

from pathlib import Path

import pytest

from benchmarks.peers.contest import Contest, Options, Result, Row
from benchmarks.peers.crew import Entrant
from benchmarks.peers.run import markdown

pytestmark = pytest.mark.slow
FAKE = Path(__file__).with_name("fake_worker.py")


def contest(folder: Path, fault: str) -> Result:
    options = Options(((4096, 3),), rounds=2, threads=1, timeout_s=60.0)
    servers = {"redis_port": 0, "s3_port": 0, "bucket": "b", "folder": str(folder)}
    run = Contest(servers, options, clear=lambda: None, progress=lambda _: None)
    ours = Entrant("ours", (str(FAKE), ""), rival=None)
    return run.run([ours, Entrant("peer", (str(FAKE), fault), rival="ours")])


def test_everybody_does_the_same_work(tmp_path: Path) -> None:
    result = contest(tmp_path, "")
    assert len(result.rows) == 6
    assert all(len(row.good()) == 2 for row in result.rows)
    assert (result.out, result.failures) == ({}, [])


def test_the_ratio_is_of_the_same_rounds() -> None:
    ours = Row("ours", None, "put", 1_000_000, [1.0, 1.0, 4.0])
    peer = Row("peer", "ours", "put", 1_000_000, [2.0, None, 12.0])
    result = Result([ours, peer], {}, [])
    assert (result.ratio(peer), result.ratio(ours)) == (2.5, None)
    cells = [line for line in markdown(result, "machine").splitlines() if "peer" in line]
    assert cells == ["| put | peer | 0 MB/s | 2/3 | 2.50 |"]


def test_wrong_bytes_give_no_figure(tmp_path: Path) -> None:
    result = contest(tmp_path, "lies")
    assert [len(row.good()) for row in result.rows if row.entrant == "peer"] == [2, 0, 2]
    assert len(result.failures) == 3
