"""Replicas that sign and encrypt what they store: equal tokens for who holds the keys, and for all
others as if nothing were stored."""

from pathlib import Path
from random import Random

import pytest

from tests.engine.cache import Values, scenario
from tests.engine.fleet import CHUNK, NUMBERS_TOLD, SharedStore, one_by_one
from tests.engine.harness import run_replicas
from tests.engine.job import Job
from tests.engine.prompts import prompt_of

CHUNKS = 3
WHOLE = CHUNKS * CHUNK
PROMPT = prompt_of(WHOLE + 9)
OLD, NEW, STRANGE = (Random(seed).randbytes(32).hex() for seed in range(3))
MARK = b"+aes256gcm"

pytestmark = pytest.mark.wide


def keys(folder: Path, name: str, text: str) -> str:
    """The path of a key file."""
    file = folder / name
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


@scenario
def sealed(folder: Path) -> Values:
    store = SharedStore(folder / "store")
    old = keys(folder, "old", f"2026-05 * {OLD}\n")
    rotated = keys(folder, "rotated", f"2026-06 * {NEW}\n2026-05 * {OLD}\n")
    strange = keys(folder, "strange", f"2026-05 * {STRANGE}\n")

    def job(file: str, **settings: str) -> Job:
        told = {"signing_keys_file": file, "encryption_keys_file": file} | settings
        return store.job(*one_by_one([PROMPT]), NUMBERS_TOLD, **told)

    alone, writer = run_replicas([Job(steps=one_by_one([PROMPT])), job(old, codec="blosc")], folder)
    stored = [path.read_bytes() for path in store.payloads()]
    within, after = run_replicas([job(old, load_mode="layerwise"), job(rotated)], folder)
    plain, stranger = run_replicas([store.job(*one_by_one([PROMPT])), job(strange)], folder)
    return {
        "alone": alone,
        "writer": writer,
        "within the step": within,
        "after rotation": after,
        "plain": plain,
        "stranger": stranger,
        "encrypted": sum(MARK in payload for payload in stored),
        "namespaces": len(store.namespaces()),
    }


@pytest.mark.parametrize("who", ["writer", "within the step", "after rotation"])
def test_who_holds_the_keys_shares(who: str) -> None:
    run = sealed()[who]
    assert run.tokens[0] == sealed()["alone"].tokens[0]
    assert run.cached[0] == (0 if who == "writer" else WHOLE)
    assert sealed()["encrypted"] == CHUNKS


def test_who_seals_nothing_lives_elsewhere() -> None:
    assert sealed()["plain"].tokens[0] == sealed()["alone"].tokens[0]
    assert sealed()["plain"].cached == [0]
    assert sealed()["namespaces"] == 2


def test_who_holds_other_keys_computes_what_it_cannot_open() -> None:
    run = sealed()["stranger"]
    assert run.tokens[0] == sealed()["alone"].tokens[0]
    assert run.metrics["vllm:objkv_load_corrupt"] >= 1
    assert any("payload refused" in line.message for line in run.warnings)
    assert not any(STRANGE in line.message or OLD in line.message for line in run.warnings)
