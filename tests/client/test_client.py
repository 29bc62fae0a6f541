"""The client on stores of one machine, and how it is opened and imported."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import objkv
from objkv.assembly.backends import Backends
from objkv.client.client import Matcher
from objkv.client.warming import _environment
from objkv.config import resolve_config
from objkv.errors import ConfigError, StoreUnavailable
from objkv.index.base import ChunkEntry
from objkv.index.fields import WrittenShards, encode_shard
from objkv.index.sqlite.index import SqliteIndex
from objkv.keys.prefix import PromptExtras
from objkv.keys.topology import Shard
from objkv.stores.local import LocalStore
from tests.client.contract import ClientContract
from tests.contracts.clock import ManualClock
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_index import MemoryIndex
from tests.contracts.memory_store import MemoryStore
from tests.ops.test_chat import folder as tokenizer_folder
from tests.ops.warm.fake_vllm import FakeVllm, Place
from tests.support.samples import CHUNK, LEFT, NAMESPACE, RIGHT, TOKENS, save, save_identity

__all__ = ["tokenizer_folder"]


class TestSqlite(ClientContract):
    @pytest.fixture
    def settings(self, urls: dict[str, str]) -> dict[str, str]:  # type: ignore[override] # a fixture
        return urls

    @pytest.mark.parametrize("shards", [(None,), (LEFT, RIGHT)], ids=["one rank", "two ranks"])
    def test_hot_copies_are_counted(
        self, client: objkv.Client, stores: Backends, shards: tuple[Shard | None, ...]
    ) -> None:
        save_identity(stores.bulk)
        keys = save(stores.bulk, stores.index, shards=shards)
        for prefix_hash in dict.fromkeys(key.prefix_hash for key in keys[: 2 * len(shards)]):
            [record] = stores.index.lookup(NAMESPACE, [prefix_hash])
            assert record is not None
            hot = {name: replace(shard, hot=True) for name, shard in record.shards.items()}
            place = (record.parent_hash, record.token_start, record.token_end)
            stores.index.publish(ChunkEntry(NAMESPACE, prefix_hash, *place), hot, ttl_s=3_600)
        found = client.match(TOKENS)
        assert (found.tokens, found.hot_tokens, found.bulk_tokens) == (48, 32, 16)
        assert [chunk.hot for chunk in client.chunks()].count(True) == 2


class TestFolderAlone(ClientContract):
    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, str]:
        return {"bulk_url": f"file://{tmp_path}/chunks", "index_url": "bulk:"}

    def test_a_gap_is_named(self) -> None:  # type: ignore[override] # narrower on purpose
        pytest.skip("a folder that is its own index looks no further than the first gap")


def test_arguments_win_over_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'bulk_url = "file://{tmp_path}/a"\nindex_url = "bulk:"\n')
    monkeypatch.setenv("OBJKV_INDEX_URL", f"sqlite://{tmp_path}/i")
    with objkv.open(config=file, role="reader") as client:
        assert repr(client) == f"<objkv.Client of file://{tmp_path}/a and sqlite://{tmp_path}/i>"
        with pytest.raises(objkv.StoreDenied, match="role reader does not allow writes"):
            client.pin(TOKENS)
    with pytest.raises(ConfigError, match=r"'bulk_uri' in the arguments of .*; did you"):
        objkv.open(bulk_uri="file:///tmp/x")


def test_reading_a_default_store_that_is_empty_creates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("OBJKV_BULK_URL", "OBJKV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with objkv.open() as client:
        assert client.namespaces() == []
        assert list(client.chunks()) == []
        assert client.pins() == []
        assert client.audit().totals.chunks == 0
    assert not (tmp_path / "objkv" / "chunks").exists()


def test_an_audit_has_the_prices_of_the_settings(urls: dict[str, str]) -> None:
    for settings, gpu_hour in (({}, None), ({"price_gpu_hour": 2.5, "price_gb_month": 1.0}, 2.5)):
        with objkv.open(**urls, **settings) as client:
            prices = client.audit().cost.prices
        assert (prices.gb_month == 1.0, prices.gpu_hour) == (bool(settings), gpu_hour)


def test_text_and_messages_become_the_model_s_tokens(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    settings = {"bulk_url": f"file://{tmp_path}/chunks", "index_url": "bulk:"}
    with objkv.open(**settings, tokenizer=tokenizer_folder) as client:
        bulk = client._backends.bulk
        save_identity(bulk)
        text = client.match("weather in Paris? " * 10)
        chat = client.match([{"role": "user", "content": "weather in Paris? " * 10}])
        assert chat.prompt_tokens > text.prompt_tokens > 10
        request = {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "a"}
        assert client.match(request).prompt_tokens < text.prompt_tokens
        with pytest.raises(ConfigError, match="content in parts") as caught:
            client.match([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])
        assert "--" not in str(caught.value)
    with objkv.open(**settings, tokenizer=tmp_path / "none") as client:
        assert client.namespaces()  # not loaded before its first use
        with pytest.raises(ConfigError, match="is not a file: name a tokenizer"):
            client.match("hi")


def test_a_match_decodes_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be most of its time for a long prompt."""
    bulk, index = MemoryStore(), MemoryIndex()
    save_identity(bulk)
    keys = save(bulk, index)
    [record] = index.lookup(NAMESPACE, [keys[0].prefix_hash])
    assert record is not None
    [(field, shard)] = record.shards.items()
    found = [
        WrittenShards((field,), [encode_shard(replace(shard, hot=hot))])
        for hot in (True, False, True)
    ]
    monkeypatch.setattr(index, "find", lambda *_: found)
    monkeypatch.setattr(WrittenShards, "_shards", lambda _: pytest.fail("it was decoded"))
    matched = Matcher(bulk, index).match(None, TOKENS, PromptExtras())
    assert (matched.tokens, matched.hot_tokens) == (48, 32)


def test_names_are_kept_for_half_a_minute_and_while_the_store_fails() -> None:
    bulk, index, clock = FlakyStore(MemoryStore()), MemoryIndex(), ManualClock()
    save_identity(bulk)
    save(bulk, index)
    matcher = Matcher(bulk, index, clock=clock)

    def chunks() -> int:
        return matcher.match("acme/tiny", TOKENS, PromptExtras()).chunks

    assert chunks() == 3
    read = len(bulk.calls)
    clock.advance(29)
    assert chunks() == 3
    assert len(bulk.calls) == read
    clock.advance(2)
    bulk.fail_until_mended(StoreUnavailable("gone"))
    assert chunks() == 3
    assert len(bulk.calls) > read
    with pytest.raises(StoreUnavailable):
        matcher.known(NAMESPACE)


IMPORTS = """
import shutil
import sys
import tempfile
import objkv
assert {"objkv.errors", "objkv.redact"} >= {n for n in sys.modules if n.startswith("objkv.")}
assert not hasattr(objkv, "nothing")
assert dir(objkv) == sorted(objkv.__all__)
assert {"open", "Client", "Match", "StoreError"} <= set(dir(objkv))
folder = tempfile.mkdtemp()
objkv.open(bulk_url=f"file://{folder}/kv", index_url=f"sqlite://{folder}/i").namespaces()
shutil.rmtree(folder)
heavy = {"torch", "vllm", "transformers", "pandas", "matplotlib", "httpx", "typer"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
assert all(getattr(objkv, name) is not None for name in objkv.__all__)
assert not {"torch", "vllm"} & set(sys.modules)
"""


def test_the_client_imports_neither_torch_nor_vllm() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=280
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stdout + ran.stderr


# ``Client.warm``: the same from Python.


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(LocalStore(tmp_path / "chunks"), SqliteIndex(tmp_path / "index.sqlite"))


@pytest.fixture
def opened(urls: dict[str, str], place: Place) -> Iterator[objkv.Client]:
    with objkv.open(**urls) as client:
        yield client


def test_a_program_warms_what_it_has_in_hand(
    tmp_path: Path, place: Place, opened: objkv.Client
) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text(json.dumps({"token_ids": TOKENS[:CHUNK]}))
    with FakeVllm(place) as server:
        report = opened.warm(
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


def test_an_option_that_does_not_exist_is_named(opened: objkv.Client) -> None:
    with pytest.raises(ConfigError, match="warm has no option endpoint, resolved"):
        opened.warm([TOKENS], endpoint="http://a", resolved=None)


@pytest.mark.parametrize("prompts", ["one", {"prompt": "one"}])
def test_one_prompt_is_not_taken_for_a_list(prompts: object, opened: objkv.Client) -> None:
    with pytest.raises(ConfigError, match="a list of prompts, not a single one"):
        opened.warm(prompts, check=True)  # type: ignore[arg-type]
