"""``Client.warm``: the same from Python."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import objkv
from objkv.client.warming import _environment
from objkv.config import resolve_config
from objkv.errors import ConfigError
from objkv.index.sqlite.index import SqliteIndex
from objkv.stores.local import LocalStore
from tests.ops.warm.fake_vllm import FakeVllm, Place
from tests.support.samples import CHUNK, TOKENS


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(LocalStore(tmp_path / "chunks"), SqliteIndex(tmp_path / "index.sqlite"))


@pytest.fixture
def client(urls: dict[str, str], place: Place) -> Iterator[objkv.Client]:
    with objkv.open(**urls) as client:
        yield client


def test_a_program_warms_what_it_has_in_hand(
    tmp_path: Path, place: Place, client: objkv.Client
) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps({"token_ids": TOKENS[:CHUNK]}))
    with FakeVllm(place) as server:
        report = client.warm(
            [
                " ".join(map(str, TOKENS)),
                {"token_ids": [7] * CHUNK, "cache_salt": "acme"},
                np.arange(CHUNK),
                file,
            ],
            endpoints=[server.url],
            at_once=2,
        )
    assert report.is_complete
    assert (report.prompts, report.warmed) == (4, 4)
    assert place.stored(TOKENS) == 3
    assert place.stored([7] * CHUNK, "acme") == 1
    assert place.stored(range(CHUNK)) == 1


def test_an_engine_that_warms_has_an_agent_of_its_own_unless_one_is_named(tmp_path: Path) -> None:
    given = {"bulk_url": f"file://{tmp_path}"}
    environ = _environment(resolve_config(given))
    assert environ["OBJKV_AGENT"] == "private"
    assert environ["OBJKV_BULK_URL"] == given["bulk_url"]
    environ = _environment(resolve_config(given | {"agent": "unix:///run/a.sock"}))
    assert environ["OBJKV_AGENT"] == "unix:///run/a.sock"


def test_an_option_that_does_not_exist_is_named(client: objkv.Client) -> None:
    with pytest.raises(ConfigError, match="warm has no option endpoint, resolved"):
        client.warm([TOKENS], endpoint="http://a", resolved=None)


@pytest.mark.parametrize("prompts", ["one", {"prompt": "one"}])
def test_one_prompt_is_not_taken_for_a_list(prompts: object, client: objkv.Client) -> None:
    with pytest.raises(ConfigError, match="a list of prompts, not a single one"):
        client.warm(prompts, check=True)  # type: ignore[arg-type]
