"""``objkv pin`` and ``objkv unpin``."""

import json
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Machine, Run, refused
from tests.support.samples import CHUNK, LEFT, NAMESPACE, TOKENS, save, save_identity

DAY_S = 86_400


@pytest.fixture
def hashes(machine: Machine) -> list[str]:
    return machine.fill()


def pinned(machine: Machine) -> list[bool]:
    records = sorted(machine.index.scan(NAMESPACE), key=lambda record: record.token_start)
    return [record.pinned for record in records]


def test_pins_are_listed_for_people(run: Run, machine: Machine, hashes: list[str]) -> None:
    assert run("pin", "--list").out == "nothing is pinned\n"
    run("pin", hashes[2])
    machine.index.drop(NAMESPACE, bytes.fromhex(hashes[1]))
    ran = run("pin", "--list", "--namespace", NAMESPACE[:4])
    assert ran.code == 0
    assert hashes[2] in ran.out
    assert "1 chunk has no record" in ran.out
    machine.bulk.put(f"{NAMESPACE}/pins/{'9' * 40}.json", b"x")
    ran = run("pin", "--list")
    assert ran.code == 1
    assert f"{'9' * 40}.json is not a pin of objkv" in ran.out
    assert run("unpin", "9" * 40).code == 0
    assert run("pin", "--list").code == 0


def test_a_prefix_is_pinned_by_its_leaf_until_it_is_unpinned(
    run: Run, machine: Machine, hashes: list[str]
) -> None:
    ran = run("pin", hashes[1], "--for", "2d")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("pinned 32 tokens, 2 chunks")
    assert pinned(machine) == [True, True, False]
    again = run("pin", hashes[1], "--for", "2d", "--json").document
    [listed] = run("pin", "--list", "--json").document["pins"]
    assert listed == again
    assert 0 <= listed["until_s"] - int(time.time()) - 2 * DAY_S + 600 <= 1_200
    ran = run("unpin", hashes[1][:9])
    assert (ran.code, ran.out) == (0, f"unpinned 32 tokens, 2 chunks: {hashes[1]}\n")
    assert pinned(machine) == [False] * 3
    refused(run("unpin", hashes[1][:9], "--json"), "no pin starts with")


def test_a_hash_that_is_not_stored_is_1(run: Run, machine: Machine, hashes: list[str]) -> None:
    ran = run("pin", "9" * 40)
    assert (ran.code, "no stored chunk starts with 999" in ran.err) == (1, True)
    machine.index.drop(NAMESPACE, bytes.fromhex(hashes[1]))
    ran = run("pin", hashes[2])
    assert (ran.code, "has no record; if it is stored, objkv rebuild --apply -n" in ran.err) == (
        1,
        True,
    )
    assert "the chunk before token 32 has no record" in ran.err


def test_a_prompt_is_pinned_as_far_as_it_is_stored(
    run: Run, machine: Machine, hashes: list[str], tmp_path: Path
) -> None:
    for options in ((), ("--json",)):
        ran = run("pin", *options, stdin=" ".join(map(str, range(40))))
        assert (ran.code, ran.out) == (1, "")
        assert "no chunk of this prompt would be served; send it to a replica first" in ran.err
    (tmp_path / "tokens.json").write_text(json.dumps([*TOKENS[: 2 * CHUNK], *range(900, 930)]))
    assert run("pin", "--tokens", str(tmp_path / "tokens.json")).code == 0
    assert pinned(machine) == [True, True, False]
    assert run("pin", stdin=json.dumps([*TOKENS, 1, 2])).code == 0
    assert pinned(machine) == [True] * 3


def test_of_a_prompt_only_what_replicas_would_load_is_pinned(run: Run, machine: Machine) -> None:
    save_identity(machine.bulk)
    save(machine.bulk, machine.index, TOKENS[:CHUNK])
    save(machine.bulk, machine.index, shards=(LEFT,))
    tokens = json.dumps(TOKENS)
    assert (
        "3 of 3 chunks of 16 tokens have a record, 2 of them incomplete"
        in run("match", stdin=tokens).out
    )
    assert run("pin", stdin=tokens).out.startswith("pinned 16 tokens, 1 chunk,")
    assert pinned(machine) == [True, False, False]
