"""``objkv.warm``: the same from Python."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import objkv
from objkv.client import warming
from objkv.client.warming import _environment
from objkv.config import resolve_config
from objkv.errors import ConfigError
from objkv.index.sqlite.index import SqliteIndex
from objkv.ops.warm import server
from objkv.stores.local import LocalStore
from tests.ops.warm.fake_vllm import FakeVllm, Place
from tests.support.samples import CHUNK, TOKENS


def test_a_program_warms_what_it_has_in_hand(tmp_path: Path) -> None:
    place = Place(LocalStore(tmp_path / "chunks"), SqliteIndex(tmp_path / "index.sqlite"))
    config = {
        "bulk_url": f"file://{tmp_path / 'chunks'}",
        "index_url": f"sqlite://{tmp_path / 'index.sqlite'}",
    }
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps({"token_ids": TOKENS[:CHUNK]}))
    with FakeVllm(place) as server:
        report = objkv.warm(
            [
                " ".join(map(str, TOKENS)),
                {"token_ids": [7] * CHUNK, "cache_salt": "acme"},
                np.arange(CHUNK),
                file,
            ],
            config=config,
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


def test_a_started_server_has_the_time_limit_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    def endpoint(url: str, **options: object) -> None:
        seen.update(options)
        raise ConfigError("seen")

    monkeypatch.setattr(server, "serving", lambda *_, **__: nullcontext(tmp_path / "socket"))
    monkeypatch.setattr(warming, "Endpoint", endpoint)
    config = {"bulk_url": f"file://{tmp_path}", "index_url": f"sqlite://{tmp_path}/i.sqlite"}
    with pytest.raises(ConfigError, match="seen"):
        objkv.warm([[1]], config=config, model="tiny", answer_s=3_600)
    assert seen["answer_s"] == 3_600


@pytest.mark.parametrize("prompts", ["one", {"prompt": "one"}])
def test_one_prompt_is_not_taken_for_a_list(prompts: object, tmp_path: Path) -> None:
    config = {"bulk_url": f"file://{tmp_path}"}
    with pytest.raises(ConfigError, match="a list of prompts, not a single one"):
        objkv.warm(prompts, config=config, check=True)  # type: ignore[arg-type]
