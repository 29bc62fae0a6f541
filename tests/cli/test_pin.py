"""``objkv pin`` and ``objkv unpin``."""

import json
import time
from pathlib import Path

import pytest

from objkv.cache.pins import read_pins
from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import CHUNK, NAMESPACE, TOKENS

DAY_S = 86_400


@pytest.fixture
def hashes(machine: Machine) -> list[str]:
    return machine.fill()


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([*TOKENS, 1, 2]))
    return path


def pinned(machine: Machine) -> list[bool]:
    records = sorted(machine.index.scan(NAMESPACE), key=lambda record: record.token_start)
    return [record.pinned for record in records]


def test_a_prefix_is_pinned_by_its_leaf(run: Run, machine: Machine, hashes: list[str]) -> None:
    ran = run("pin", hashes[1])
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("pinned 32 tokens, 2 chunks")
    assert pinned(machine) == [True, True, False]
    assert set(read_pins(machine.bulk, NAMESPACE)) == {bytes.fromhex(h) for h in hashes[:2]}


@pytest.mark.parametrize("options", [("--tokens",), ()])
def test_a_prompt_is_pinned_as_far_as_it_is_stored(
    run: Run, machine: Machine, hashes: list[str], prompt: Path, options: tuple[str, ...]
) -> None:
    ids = " ".join(map(str, [*TOKENS[: 2 * CHUNK], *range(900, 930)]))
    ran = run("pin", *(("--tokens", str(prompt)) if options else ()), stdin=ids)
    assert ran.code == 0
    assert pinned(machine) == [True, True, bool(options)]


def test_a_pin_ends_when_it_was_told_to(run: Run, hashes: list[str]) -> None:
    before = int(time.time())
    document = run("pin", hashes[2], "--for", "2d", "--json").document
    assert (document["leaf"], document["tokens"]) == (hashes[2], 3 * CHUNK)
    assert 0 <= document["until_s"] - before - 2 * DAY_S <= 600
    listed = run("pin", "--list", "--json").document
    assert list(listed) == ["pins", "problems"]
    assert listed["pins"] == [document]
    assert run("unpin", hashes[2], "--json").document["leaf"] == hashes[2]


def test_pins_are_listed_for_people(run: Run, machine: Machine, hashes: list[str]) -> None:
    assert run("pin", "--list").out == "nothing is pinned\n"
    run("pin", hashes[2])
    machine.index.drop(NAMESPACE, bytes.fromhex(hashes[1]))
    ran = run("pin", "--list", "--namespace", NAMESPACE[:4])
    assert ran.code == 0
    assert hashes[2] in ran.out
    assert "1 chunk is not stored" in ran.out
    machine.bulk.put(f"{NAMESPACE}/pins/{'9' * 40}.json", b"x")
    ran = run("pin", "--list")
    assert ran.code == 1
    assert f"{'9' * 40}.json is not a pin of objkv" in ran.out


def test_a_pin_is_ended_by_the_beginning_of_its_leaf(
    run: Run, machine: Machine, hashes: list[str]
) -> None:
    run("pin", hashes[2])
    ran = run("unpin", hashes[2][:9])
    assert (ran.code, ran.out) == (0, f"unpinned 48 tokens, 3 chunks: {hashes[2]}\n")
    assert pinned(machine) == [False] * 3
    assert read_pins(machine.bulk, NAMESPACE) == {}
    refused(run("unpin", hashes[2][:9]), "no pin starts with")


def test_a_prompt_of_which_nothing_is_stored_is_told(run: Run, hashes: list[str]) -> None:
    ran = run("pin", stdin=" ".join(map(str, range(40))))
    assert (ran.code, ran.out) == (
        1,
        "no chunk of this prompt is stored; send it to a replica first\n",
    )
