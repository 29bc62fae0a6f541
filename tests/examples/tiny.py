"""A tiny model that reads text: ``MODEL`` of the examples, where none can be downloaded.

    python -m tests.examples.tiny            # makes it, and prints its folder

The weights are those of the engine tests, so wrong KV produces wrong tokens. The tokenizer is
trained on sentences like those of the examples, so their prompts are a few thousand tokens long.
"""

import json
import shutil
from pathlib import Path

from tests.engine import model

ROOT = Path(__file__).resolve().parents[2]
_POSITIONS = 8192
_SPECIAL = ["<s>", "</s>", "<pad>"]
_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make() -> Path:
    return model.make_once(model.place("text", __file__, model.__file__), _save)


def _save(folder: Path) -> None:
    shutil.copytree(model.make("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = _POSITIONS
    (folder / "config.json").write_text(json.dumps(config))
    _add_tokenizer(folder)


def _add_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=model.VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)


def _text() -> list[str]:
    """Plain English with numbers. No page of the docs, or editing it would change token counts."""
    numbers = [f"Shelf {n} holds {n * 7 % 90} boxes. Alice has {n} apples." for n in range(400)]
    return [*numbers, (ROOT / "LICENSE").read_text()]


if __name__ == "__main__":
    print(make())
