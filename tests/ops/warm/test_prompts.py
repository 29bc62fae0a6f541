"""The prompts that are to be warmed."""

from pathlib import Path
from typing import Any

import pytest

from objkv.errors import ConfigError
from objkv.ops.warm.prompts import Chat, WarmPrompt, read_prompts, to_prompt

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ("tell me", WarmPrompt("p", text="tell me")),
        ([1, 2], WarmPrompt("p", tokens=(1, 2))),
        ({"prompt": "tell me"}, WarmPrompt("p", text="tell me")),
        ({"prompt": [1, 2]}, WarmPrompt("p", tokens=(1, 2))),
        ({"token_ids": [1, 2], "max_tokens": 9}, WarmPrompt("p", tokens=(1, 2))),
        ({"prompt": "x", "cache_salt": "s"}, WarmPrompt("p", text="x", salt="s")),
        ({"prompt": "x", "model": "m"}, WarmPrompt("p", text="x", model="m")),
        ({"messages": MESSAGES}, WarmPrompt("p", chat=Chat(tuple(MESSAGES)))),
        (
            {"custom_id": "a-7", "method": "POST", "body": {"messages": MESSAGES, "model": "m"}},
            WarmPrompt("p (a-7)", chat=Chat(tuple(MESSAGES)), model="m"),
        ),
    ],
)
def test_a_prompt_has_many_forms(line: Any, prompt: WarmPrompt) -> None:
    assert to_prompt(line, "p") == prompt


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (7, "a prompt must be text"),
        ({}, "but has none"),
        ({"prompt": "x", "messages": MESSAGES}, "but has prompt, messages"),
        ({"prompt": [[1], [2]]}, "'[1]' is not a token id"),
        ({"token_ids": [True]}, "'True' is not a token id"),
        ({"token_ids": [1 << 32]}, "is not a token id"),
        ({"token_ids": []}, "has no token ids"),
        ({"token_ids": "1 2"}, "a list of integers"),
        ({"messages": "hello"}, "messages must be a list"),
        ({"messages": [{"content": "x"}]}, "with a role"),
        ({"prompt": "x", "cache_salt": 1}, "cache_salt must be text"),
        ({"body": 1}, "body must be an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "'image_url'; only text can be warmed",
        ),
    ],
)
def test_what_is_no_prompt_is_named(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^here:3") as raised:
        to_prompt(value, "here:3")
    assert words in str(raised.value)


def test_files_and_whole_texts_are_read(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('[1, 2]\n\n{"prompt": "x"}\n')
    (tmp_path / "a.jsonl").write_text('"y"')
    (tmp_path / "c.txt").write_text("one\ntwo")
    found = list(read_prompts([str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.txt")]))
    assert [prompt.name for prompt in found] == [
        f"{tmp_path}/a.jsonl:1",
        f"{tmp_path}/b.jsonl:1",
        f"{tmp_path}/b.jsonl:3",
        f"{tmp_path}/c.txt",
    ]
    assert found[3].text == "one\ntwo"


def test_a_line_that_is_not_json_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not JSON"):
        list(read_prompts([str(tmp_path / "a.jsonl")]))
