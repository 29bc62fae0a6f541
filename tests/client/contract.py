"""What a client promises, whatever its stores are."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import objkv
from objkv.assembly.backends import Backends, open_backends
from objkv.config import resolve_config
from objkv.errors import ConfigError, NotStored, UnclearName
from objkv.keys.chunk import ChunkKey
from objkv.telemetry import NullRecorder
from tests.support.samples import (
    CHUNK,
    IDENTITY,
    LEFT,
    NAMESPACE,
    RIGHT,
    TOKENS,
    save,
    save_identity,
)

OTHER = replace(IDENTITY, model="acme/large")


class ClientContract:
    """Subclasses have a fixture ``settings``: the settings of stores that are empty."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, str]:
        raise NotImplementedError

    @pytest.fixture
    def stores(self, settings: dict[str, str]) -> Iterator[Backends]:
        with open_backends(resolve_config(settings).config, NullRecorder()) as opened:
            yield opened

    @pytest.fixture
    def client(self, settings: dict[str, str], stores: Backends) -> Iterator[objkv.Client]:
        with objkv.Client(resolve_config(settings), stores) as opened:
            yield opened

    @pytest.fixture
    def keys(self, stores: Backends) -> list[ChunkKey]:
        """Three chunks that are stored whole."""
        save_identity(stores.bulk)
        return save(stores.bulk, stores.index)

    def test_empty_stores_have_nothing(self, client: objkv.Client) -> None:
        assert client.namespaces() == []
        assert list(client.chunks()) == []
        assert client.pins() == []
        with pytest.raises(UnclearName, match="has no namespaces"):
            client.match(TOKENS)

    def test_namespaces_are_described(
        self, client: objkv.Client, stores: Backends, keys: list[ChunkKey]
    ) -> None:
        stores.bulk.put(f"{'0' * 32}/identity.json", b"{}")
        broken, sound = client.namespaces()
        assert sound == objkv.Namespace(
            name=NAMESPACE,
            model="acme/tiny",
            tenant="default",
            kv_dtype="bfloat16",
            chunk_tokens=CHUNK,
            weights_epoch=0,
            problem=None,
        )
        assert (broken.name, broken.model) == ("0" * 32, None)
        assert "identity" in (broken.problem or "")

    def test_a_stored_prompt_matches(self, client: objkv.Client, keys: list[ChunkKey]) -> None:
        whole = client.match([*TOKENS, 7])
        assert whole == objkv.Match(
            namespace=NAMESPACE,
            model="acme/tiny",
            chunk_tokens=CHUNK,
            prompt_tokens=len(TOKENS) + 1,
            tokens=len(TOKENS),
            hot_tokens=0,
            chunks=3,
            prompt_chunks=3,
            end="complete",
        )
        assert whole.bulk_tokens == len(TOKENS)
        part = client.match([*TOKENS[:CHUNK], *range(CHUNK)], namespace="acme/tiny")
        assert (part.tokens, part.end) == (CHUNK, "missing")
        assert part.why == "tokens 16-32 are not stored"
        short = client.match(TOKENS[:5], namespace=f"default/{IDENTITY.model}")
        assert (short.tokens, short.end, short.prompt_chunks) == (0, "short", 0)

    def test_shards_of_several_ranks_make_one_chunk(
        self, client: objkv.Client, stores: Backends
    ) -> None:
        save_identity(stores.bulk)
        save(stores.bulk, stores.index, shards=(LEFT, RIGHT))
        save(stores.bulk, stores.index, TOKENS[:CHUNK] + (9,) * CHUNK, shards=(LEFT,))
        assert client.match(TOKENS).chunks == 3
        half = client.match((*TOKENS[:CHUNK], *(9,) * CHUNK))
        assert (half.chunks, half.end) == (1, "incomplete")
        assert half.why == "only part of the KV of tokens 16-32 is stored"

    def test_a_gap_is_named(
        self, client: objkv.Client, stores: Backends, keys: list[ChunkKey]
    ) -> None:
        assert stores.admin is not None
        stores.bulk.delete(keys[1].path())
        stores.admin.drop(NAMESPACE, keys[1].prefix_hash)
        found = client.match(TOKENS)
        assert (found.tokens, found.end) == (CHUNK, "gap")

    def test_prompts_have_many_forms(self, client: objkv.Client, keys: list[ChunkKey]) -> None:
        tokens = list(TOKENS)
        for prompt in (
            tokens,
            tuple(tokens),
            range(TOKENS[0], TOKENS[-1] + 1),
            array("I", tokens),
            array("l", tokens),
            {"prompt": tokens},
            {"token_ids": tokens, "max_tokens": 5},
        ):
            assert client.match(prompt).tokens == len(TOKENS)
        assert client.match(np.array(tokens)).tokens == len(TOKENS)  # type: ignore[arg-type] # duck
        salted = client.match({"prompt": tokens, "cache_salt": "a"})
        assert salted.tokens == client.match(tokens, cache_salt="a").tokens == 0
        assert client.match(tokens, lora_digest="ab" * 32).tokens == 0

    @pytest.mark.parametrize(
        ("prompt", "words"),
        [
            ([], "the prompt is empty"),
            ([-1], "below 2\\*\\*32"),
            ([1 << 32], "below 2\\*\\*32"),
            (["1"], "below 2\\*\\*32"),
            (b"abc", "a prompt must be"),
            (7, "a prompt must be"),
            ({"max_tokens": 5}, "exactly one of"),
            ("text", "tokenizer="),
            ([{"role": "user", "content": "hi"}], "tokenizer="),
        ],
    )
    def test_a_wrong_prompt_is_refused(
        self, client: objkv.Client, keys: list[ChunkKey], prompt: objkv.client.client.Prompt,
        words: str,
    ) -> None:  # fmt: skip
        with pytest.raises(ConfigError, match=words) as caught:
            client.match(prompt)
        assert "--" not in str(caught.value)

    def test_an_unclear_namespace_lists_the_choices(
        self, client: objkv.Client, stores: Backends, keys: list[ChunkKey]
    ) -> None:
        save_identity(stores.bulk, OTHER)
        with pytest.raises(UnclearName, match="2 namespaces") as caught:
            client.match(TOKENS, namespace="acme")
        assert len(caught.value.choices) == 2
        assert "--" not in str(caught.value)
        assert client.match(TOKENS, namespace="acme/large").tokens == 0
        assert client.match(TOKENS, namespace=NAMESPACE[:6]).chunks == 3
        with pytest.raises(ConfigError, match="identity"):
            client.match(TOKENS, namespace="f" * 32)

    def test_chunks_are_listed_and_tabulated(
        self, client: objkv.Client, keys: list[ChunkKey]
    ) -> None:
        chunks = sorted(client.chunks("acme/tiny"), key=lambda chunk: chunk.token_start)
        assert [chunk.prefix_hash for chunk in chunks] == [key.prefix_hash.hex() for key in keys]
        assert chunks[1].parent_hash == chunks[0].prefix_hash
        assert [(c.token_start, c.payloads, c.hot) for c in chunks] == [
            (number * CHUNK, 1, False) for number in range(3)
        ]
        assert all(chunk.nbytes > chunk.raw_bytes > 0 for chunk in chunks)
        with pytest.raises(FrozenInstanceError):
            chunks[0].hits = 1  # type: ignore[misc] # on purpose
        frame = pd.DataFrame(client.chunks()).sort_values("token_start")
        assert list(frame.columns) == [field.name for field in fields(objkv.Chunk)]
        assert list(frame.nbytes) == [chunk.nbytes for chunk in chunks]

    def test_pins_come_and_go(self, client: objkv.Client, keys: list[ChunkKey]) -> None:
        pin = client.pin([*TOKENS[: 2 * CHUNK], 1], for_s=3_600)
        assert (pin.leaf, pin.tokens, pin.chunks) == (keys[1].prefix_hash.hex(), 2 * CHUNK, 2)
        assert client.pins() == client.pins("acme/tiny") == [pin]
        pinned = {chunk.prefix_hash for chunk in client.chunks() if chunk.pinned_until_s}
        assert pinned == {key.prefix_hash.hex() for key in keys[:2]}
        other = client.pin(leaf=keys[2].prefix_hash.hex())
        assert [one.chunks for one in client.pins()] == [2, 3]
        client.unpin(pin)
        client.unpin(other.leaf)
        assert client.pins() == []
        with pytest.raises(NotStored, match="is not pinned"):
            client.unpin(pin)
        with pytest.raises(NotStored, match="no chunk of this prompt"):
            client.pin(list(range(CHUNK)))
        for forever in (math.inf, math.nan, -1.0, 1e300):
            with pytest.raises(ConfigError, match="end"):
                client.pin(TOKENS, for_s=forever)
        for leaf in ("0" * 40, "abc"):
            with pytest.raises(ConfigError):
                client.pin(leaf=leaf)
        with pytest.raises(ConfigError, match="either a prompt or a leaf"):
            client.pin()

    def test_a_closed_client_says_so(self, client: objkv.Client) -> None:
        client.close()
        client.close()
        calls = (client.namespaces, client.pins, client.audit, client.chunks)
        for call in (*calls, lambda: client.match(TOKENS), lambda: client.pin(TOKENS)):
            with pytest.raises(ConfigError, match="the client is closed"):
                call()

    def test_an_audit_reports_what_is_stored(
        self, client: objkv.Client, keys: list[ChunkKey]
    ) -> None:
        stages: list[str] = []
        report = client.audit(on_progress=lambda stage, done, total: stages.append(stage))
        assert report.totals.chunks == 3
        assert [one.model for one in report.namespaces] == ["acme/tiny"]
        assert report.problems == client.audit("acme/tiny").problems
        assert stages

    def test_prompts_are_checked(self, client: objkv.Client, keys: list[ChunkKey]) -> None:
        report = client.warm([list(TOKENS), [1] * CHUNK], check=True)
        assert (report.prompts, report.stored_before) == (2, 1)
