"""``objkv match --explain`` says what a replica then loads: vLLM's scheduler, objkv's connector and
a node agent, in one situation each."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from objkv.assembly.backends import open_backends
from objkv.cli.app import app
from objkv.config import load_config
from objkv.stores.local import LocalStore
from objkv.telemetry import NullRecorder
from tests.faults.toy import CHUNKS, LAYOUT, STORED_TOKENS, TAIL, ShakenEngine, prompt
from tests.support.waiting import wait_until

CHUNK = LAYOUT.chunk_tokens
KEPT = prompt(1)
"""Its three chunks are stored at the beginning of each situation."""


@dataclass
class Place:
    """A folder with stores, where ``KEPT`` is stored."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the replica and of the command."""
    asks: dict[str, Any] = field(default_factory=dict)
    """Of the prompt: ``tokens``, ``salt``."""

    @property
    def urls(self) -> dict[str, Any]:
        return {
            "bulk_url": f"file://{self.folder}/chunks",
            "index_url": f"sqlite://{self.folder}/index.sqlite",
        }

    @property
    def payloads(self) -> list[Path]:
        """Of ``KEPT``, by token."""
        namespace = LocalStore(self.folder / "chunks").folders("")[0]
        matched = run(self, "match", "--json", "-n", namespace, tokens=KEPT)
        return [
            next((self.folder / "chunks").rglob(f"{chunk['prefix_hash']}/*.safetensors"))
            for chunk in matched["chunks"]
        ]

    def drop_record(self, number: int) -> None:
        payload = self.payloads[number]
        with open_backends(load_config(self.urls, environ={}), NullRecorder()) as backends:
            assert backends.admin is not None
            namespace = payload.parents[2].name
            backends.admin.drop(namespace, bytes.fromhex(payload.parent.name))


def run(place: Place, *words: str, tokens: list[int]) -> Any:
    settings = {"agent": "private"} | place.urls | place.settings
    environ = {f"OBJKV_{name.upper()}": str(value) for name, value in settings.items()}
    ran = CliRunner().invoke(app, list(words), input=json.dumps(tokens), env=environ)
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def header_broken(place: Place) -> None:
    payload = place.payloads[1]
    content = bytearray(payload.read_bytes())
    content[200] ^= 1
    payload.write_bytes(content)


def chunk_swept(place: Place) -> None:
    payload = place.payloads[1]
    place.drop_record(1)
    payload.unlink()


def last_quarantined(place: Place) -> None:
    payload = place.payloads[2]
    place.drop_record(2)
    target = place.folder / "chunks/quarantine" / payload.relative_to(place.folder / "chunks")
    target.parent.mkdir(parents=True)
    payload.rename(target)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where a replica has saved ``KEPT``."""
    place = Place(tmp_path_factory.mktemp("stored"))
    with ShakenEngine(place.folder, admission="always", **place.urls) as engine:
        engine.answer(KEPT)
        engine.save_all()
    return place.folder


@pytest.fixture
def place(stored: Path, tmp_path: Path) -> Iterator[Place]:
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path)


def compared(place: Place, engine: ShakenEngine, url: str) -> tuple[Any, int]:
    """The explanation of the prompt, and how many of its tokens the replica loads then."""
    tokens, salt = place.asks.get("tokens", KEPT), place.asks.get("salt")
    place.settings["agent"] = url
    namespace = engine.scheduler.connector.scheduler.namespace
    wait_until(lambda: (place.folder / "chunks" / namespace / "identity.json").exists())
    words = ["match", "--explain", "--json", "-n", namespace]
    words += [] if salt is None else ["--cache-salt", salt]
    why = run(place, *words, tokens=tokens)["explanation"]
    engine.counted()
    (answer,) = engine.run([tokens], max_tokens=1, salt=salt)
    failed = LAYOUT.block_sizes[0] * engine.counted()["load_failed_blocks"]
    return why, answer.loaded - failed


@pytest.mark.parametrize(
    ("happens", "cause", "served", "words"),
    [
        ({}, "nothing", CHUNKS, "every whole chunk"),
        ({"tokens": KEPT[:5]}, "nothing", 0, "shorter than one chunk"),
        ({"tokens": KEPT[:-TAIL] + prompt(2)}, "unknown", CHUNKS, "in neither the index nor the"),
        ({"tokens": KEPT[:CHUNK] + prompt(2)[CHUNK:]}, "diverged", 1, "1 other prompt continues"),
        ({"salt": "acme"}, "other_extras", 0, "without the cache_salt"),
        ({"weights_epoch": 7}, "elsewhere", 0, "weights_epoch"),
        (lambda place: place.payloads[1].unlink(), "missing", 1, "not in the bulk store"),
        (header_broken, "corrupt", 1, "replicas refuse it"),
        (lambda place: place.drop_record(1), "orphan", 1, "stored without a record"),
        (chunk_swept, "gone", 1, "later chunks of this prompt are stored"),
        (last_quarantined, "quarantined", 2, "is quarantined"),
        (
            lambda place: run(place, "admission", "never", "--json", tokens=[]),
            *("switched_off", 0, "nothing is loaded now"),
        ),
    ],
)
def test_a_replica_loads_what_is_explained(
    place: Place,
    happens: Callable[[Place], None] | dict[str, Any],
    cause: str,
    served: int,
    words: str,
) -> None:
    """``happens``: to the stores, or what is asked and set otherwise."""
    if not isinstance(happens, dict):
        happens(place)
    elif "weights_epoch" in happens:
        place.settings |= happens
    else:
        place.asks |= happens
    settings = {"admission": "always"} | place.urls | place.settings
    with ShakenEngine(place.folder, **settings) as engine:
        assert engine.agent is not None
        why, loaded = compared(place, engine, engine.agent.url)
    assert (why["cause"], why["served_tokens"], loaded) == (cause, served * CHUNK, served * CHUNK)
    assert words in why["sentence"]


def test_what_an_agent_holds_back_is_served_on_its_node_and_no_prompt_need_change(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    settings = {"admission": "always", "save_to_bucket": "reused"} | place.urls
    with ShakenEngine(tmp_path, **settings) as engine:
        assert engine.agent is not None
        engine.answer(KEPT, fetches=False)
        engine.save_all()
        engine.forget()
        why, loaded = compared(place, engine, engine.agent.url)
    assert (why["cause"], why["served_tokens"], loaded) == ("held_back", *2 * [STORED_TOKENS])
    assert "nothing is wrong" in why["advice"][0]


def test_what_is_in_memory_is_served_although_the_bucket_lost_it(place: Place) -> None:
    with ShakenEngine(place.folder, admission="always", **place.urls) as engine:
        assert engine.agent is not None
        engine.answer(KEPT)
        engine.forget()
        place.payloads[1].unlink()
        why, loaded = compared(place, engine, engine.agent.url)
    assert (why["cause"], why["served_tokens"], loaded) == ("nothing", *2 * [STORED_TOKENS])


def test_without_the_agent_that_is_configured_nothing_is_loaded(place: Place) -> None:
    url = f"unix://{place.folder}/no.sock"
    with ShakenEngine(place.folder, admission="always", agent=url, **place.urls) as engine:
        why, loaded = compared(place, engine, url)
    assert (why["cause"], why["served_tokens"], loaded) == ("agent_away", 0, 0)
