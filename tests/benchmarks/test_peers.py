"""Peers are asked in turn and held to the bytes that were put."""

from pathlib import Path

import pytest

from benchmarks.peers.contest import Contest, Entrant, Result, Row
from benchmarks.peers.run import markdown

pytestmark = pytest.mark.slow
FAKE = Path(__file__).with_name("fake_worker.py")


@pytest.mark.parametrize(
    ("fault", "rounds", "out"),
    [("", [2, 2, 2], {}), ("lies", [0, 0], {"peer": "a get brought other bytes than were put"})],
)
def test_all_do_the_same_work_and_wrong_bytes_give_no_figure(
    tmp_path: Path, fault: str, rounds: list[int], out: dict[str, str]
) -> None:
    servers = {"redis_port": 0, "s3_port": 0, "bucket": "b", "folder": str(tmp_path)}
    contest = Contest(servers, lambda: None, ((4096, 3),), rounds=2, threads=1, timeout_s=60.0)
    ours = Entrant("ours", (str(FAKE), ""), rival=None)
    result = contest.run([ours, Entrant("peer", (str(FAKE), fault), rival="ours")])
    assert [len(row.seconds) for row in result.rows if row.entrant == "ours"] == [2, 2, 2]
    assert [len(row.seconds) for row in result.rows if row.entrant == "peer"] == rounds
    assert result.out == out


def test_the_ratio_is_of_the_same_rounds() -> None:
    ours = Row("ours", None, "put", 1_000_000, [1.0, 1.0, 4.0])
    peer = Row("peer", "ours", "put", 1_000_000, [2.0, 3.0])
    result = Result([ours, peer])
    assert (result.ratio(peer), result.ratio(ours)) == (2.5, None)
    cells = [line for line in markdown(result, "machine") if "peer" in line]
    assert cells == ["| put | peer | 0 MB/s | 2 | 2.50 |"]
