"""Token ids of text and messages, as the library that templates are written for makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from objkv.errors import ConfigError
from objkv.ops.chat import LocalTokenizer
from objkv.ops.warm.prompts import WarmPrompt, to_prompt

TEMPLATE = """{{- bos_token }}
{%- if tools %}
{{- '<tools>' + (tools | tojson) + '</tools>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
    {%- if loop.index0 > 100 %}{% break %}{% endif %}
<{{ message.role }}>{{ message.content | trim }}
    {%- for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson(indent=2) }})
{{ call.function.arguments.city }}
    {%- endfor %}
{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if think %}hm{% endif %}{% endif %}"""
USER = {"role": "user", "content": "  how is the “weather” <in> Paris? "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris", "é": [1]}'},
        }
    ],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "<it> & “more”"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that adds a special token by itself."""
    place = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEMPLATE, "how is the weather in Paris?"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4, stride=1)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(place / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False, "rstrip": False},
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_of",
    [
        {"messages": [USER]},
        {"messages": [USER], "add_generation_prompt": False},
        {"messages": [{"role": "system", "content": "Be  brief"}, USER], "tools": TOOLS},
        {"messages": [USER], "chat_template_kwargs": {"think": True}},
        {"messages": [USER], "chat_template": "{{ messages[0]['content'] }}{{ eos_token }}"},
    ],
)
def test_messages_have_the_tokens_that_transformers_gives_them(
    folder: Path, reference: Any, request_of: dict[str, Any]
) -> None:
    prompt = to_prompt(request_of, "p")
    expected = reference.apply_chat_template(
        request_of["messages"],
        tools=request_of.get("tools"),
        chat_template=request_of.get("chat_template"),
        add_generation_prompt=request_of.get("add_generation_prompt", True),
        tokenize=True,
        return_dict=False,
        **request_of.get("chat_template_kwargs", {}),
    )
    assert LocalTokenizer(folder).tokenize(prompt) == list(expected)


@pytest.mark.slow
def test_arguments_of_calls_are_parsed_before_the_template_sees_them(
    folder: Path, reference: Any
) -> None:
    parsed = json.loads(json.dumps(CALL))
    arguments = parsed["tool_calls"][0]["function"]["arguments"]
    parsed["tool_calls"][0]["function"]["arguments"] = json.loads(arguments)
    expected = reference.apply_chat_template(
        [USER, parsed], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    prompt = to_prompt({"messages": [USER, CALL]}, "p")
    assert LocalTokenizer(folder).tokenize(prompt) == list(expected)


@pytest.mark.slow
def test_text_gets_the_special_tokens_that_the_tokenizer_adds(folder: Path, reference: Any) -> None:
    tokens = LocalTokenizer(folder).tokenize(WarmPrompt("p", text="how is the weather?"))
    assert tokens == reference.encode("how is the weather?")
    assert tokens[0] == 0


@pytest.mark.parametrize(
    ("request_of", "words"),
    [
        ({"messages": [{"role": "judge", "content": "x"}]}, "no such role: judge"),
        (
            {"messages": [USER], "continue_final_message": True},
            "only with a server's own tokenizer",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
            "content in parts works only with a server's own tokenizer",
        ),
        ({"messages": [USER], "chat_template": "{{ ''.__class__.__mro__ }}"}, "unsafe"),
        ({"messages": [USER], "chat_template": "{% for %}"}, "the chat template failed"),
    ],
)
def test_what_cannot_be_rendered_here_is_named(
    folder: Path, request_of: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=r"^p: ") as raised:
        LocalTokenizer(folder).tokenize(to_prompt(request_of, "p"))
    assert words in str(raised.value)
