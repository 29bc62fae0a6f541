"""Prompts that one process computed are generated from in another, as if it had computed them.

Every process runs with vLLM out of reach.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from tests.connector.handoff.model import Model, Shape, next_token, prompts

ROOT = Path(__file__).parents[3]
PROMPTS = [
    [random.Random(seed).randrange(97) for _ in range(length)]
    for seed, length in enumerate((5, 17, 33))
]
"""Of lengths that are no multiples of anything."""
PREFILL_TABLES = [[1, 2], [9, 3, 4, 5, 6, 40], list(range(20, 32))]
DECODE_TABLES = [[50, 7, 8, 9], [10, 60, 11, 12, 13, 14, 15], [*range(41, 30, -1), 63]]


class Ranks:
    """The processes of an engine, each with one rank; engines that follow each other share them."""

    def __init__(self, count: int, log: Path) -> None:
        with log.open("wb") as errors:
            self._running = [
                subprocess.Popen(
                    [sys.executable, "-m", "tests.connector.handoff.job"],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                for _ in range(count)
            ]
        self._log = log

    def run(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank of a job said."""
        used = self._running[: job.get("tp", 1) * job.get("pp", 1)]
        meeting = Path(job["folder"]) / f"meeting-{uuid4()}"
        for rank, process in enumerate(used):
            assert process.stdin is not None
            print(
                json.dumps({**job, "rank": rank, "meeting": str(meeting)}),
                file=process.stdin,
                flush=True,
            )
        said = [json.loads(self._line(process)) for process in used]
        assert all(one["vllm"] == [] for one in said)
        return said

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self._log.read_text()
        return line

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def prefills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("prefills") / "log")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def decodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("decodes") / "log")
    yield ranks
    ranks.close()


def prefill(folder: Path, **more: Any) -> dict[str, Any]:
    tables = {"prompts": PROMPTS, "tables": PREFILL_TABLES, "follow": []}
    return {"folder": str(folder), "mode": "prefill", **tables, **more}


def decode(folder: Path, **more: Any) -> dict[str, Any]:
    tables = {"prompts": PROMPTS, "tables": DECODE_TABLES, "follow": [0, 1, 2]}
    return {"folder": str(folder), "mode": "decode", **tables, **more}


@cache
def alone(*, latent: bool = False) -> list[list[int]]:
    """The tokens of one process that computes everything itself."""
    model = Model(Shape(latent=latent))
    caches = model.caches()
    output = model.forward(prompts(PROMPTS, DECODE_TABLES), caches)
    assert isinstance(output, torch.Tensor)
    ends = [len(PROMPTS[0]), len(PROMPTS[0]) + len(PROMPTS[1]), len(output)]
    told = []
    for prompt, table, end in zip(PROMPTS, DECODE_TABLES, ends, strict=True):
        hidden, tokens = output[end - 1], []
        for place in range(len(prompt), len(prompt) + 8):
            tokens.append(model.token(hidden))
            after = model.forward(next_token(tokens[-1], place, table), caches)
            assert isinstance(after, torch.Tensor)
            hidden = after[0]
        told.append(tokens)
    assert len({tuple(tokens) for tokens in told}) == len(PROMPTS)
    assert all(len(set(tokens)) > 2 for tokens in told)
    return told


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "mla"])
def test_everything_received_gives_the_tokens_of_one_process(
    folder: Path, prefills: Ranks, decodes: Ranks, *, latent: bool
) -> None:
    (sent,) = prefills.run(prefill(folder, latent=latent))
    assert sent["computed"] == sum(map(len, PROMPTS))
    (received,) = decodes.run(decode(folder, latent=latent))
    assert received["bypass"]
    assert received["computed"] == 0
    assert received["tokens"] == alone(latent=latent)


@pytest.mark.parametrize("sent", [[], [0, 2]], ids=["nothing", "something"])
def test_nothing_or_something_received_is_all_computed_again(
    folder: Path, prefills: Ranks, decodes: Ranks, sent: list[int]
) -> None:
    if sent:
        tables = [PREFILL_TABLES[i] for i in sent]
        some = {"prompts": [PROMPTS[i] for i in sent], "tables": tables}
        prefills.run(prefill(folder, **some))
    (received,) = decodes.run(decode(folder))
    assert not received["bypass"]
    assert received["computed"] == sum(map(len, PROMPTS))
    assert received["tokens"] == alone()


@pytest.mark.parametrize(
    ("tp", "pp", "latent"),
    [(2, 1, False), (1, 2, False), (2, 1, True)],
    ids=["tp2", "pp2", "tp2-mla"],
)
def test_every_rank_hands_over_what_it_holds(
    folder: Path, prefills: Ranks, decodes: Ranks, tp: int, pp: int, *, latent: bool
) -> None:
    shape = {"tp": tp, "pp": pp, "latent": latent}
    prefills.run(prefill(folder, **shape))
    saved = {path.name for path in (folder / "chunks").rglob("*.safetensors")}
    assert len(saved) == (1 if latent else 2)
    said = decodes.run(decode(folder, **shape))
    assert all(one["bypass"] and one["computed"] == 0 for one in said)
    assert said[-1]["tokens"] == alone(latent=latent)


def test_a_rank_that_misses_makes_its_whole_stage_compute(
    folder: Path, prefills: Ranks, decodes: Ranks
) -> None:
    prefills.run(prefill(folder, tp=2))
    min((folder / "chunks").rglob("0.L0-3_H2-4.safetensors")).unlink()
    said = decodes.run(decode(folder, tp=2))
    assert not any(one["bypass"] for one in said)
    assert said[-1]["tokens"] == alone()


def test_a_stage_that_misses_computes_from_what_the_one_before_received(
    folder: Path, prefills: Ranks, decodes: Ranks
) -> None:
    prefills.run(prefill(folder, pp=2))
    min((folder / "chunks").rglob("0.L1-3_H0-4.safetensors")).unlink()
    first, last = decodes.run(decode(folder, pp=2))
    assert first["bypass"]
    assert not last["bypass"]
    assert last["tokens"] == alone()
