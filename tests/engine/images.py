"""A tiny model that sees images, made on the spot, and prompts with images for it.

    Job(steps=(images([IMAGE_PROMPT]),), engine=engine(make_model(folder)))

Idefics3, because its processor runs without torchvision. Its weights are drawn with a standard
deviation of 0.08, so that another image, or wrong KV, changes the greedy tokens.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from tests.engine.job import Call

WORDS = 1024
SIDE = 64
"""Pixels."""
IMAGE_TOKENS = 7
"""Of one image in a prompt: four embeddings and what stands around them."""
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
IMAGE = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


class Shown(TypedDict):
    """A prompt: ``words`` with ``<image>`` where an image stands, and one seed for each image."""

    words: str
    seeds: list[int]


def words(first: int, count: int) -> str:
    """``count`` words, one token each."""
    return " ".join(f"w{first + i}" for i in range(count))


def make_model(folder: Path) -> Path:
    """Make the model in a process of its own; ``folder`` must not exist."""
    subprocess.run([sys.executable, "-m", "tests.engine.images", str(folder)], check=True)
    return folder


def engine(folder: Path) -> dict[str, Any]:
    """Engine arguments for the model."""
    return {
        "model": str(folder),
        "skip_tokenizer_init": False,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "limit_mm_per_prompt": {"image": 2},
    }


def images(prompts: Sequence[Shown], *, max_tokens: int = 8) -> Call:
    """The step that runs these prompts one by one; see ``generate`` for its answer."""
    arguments = {"prompts": list(prompts), "max_tokens": max_tokens}
    return Call(function="tests.engine.images:generate", arguments=arguments)


def generate(llm: Any, prompts: list[Shown], max_tokens: int) -> list[dict[str, Any]]:
    """Per prompt its length, the cached part of that, and the generated tokens. Nothing is found in
    the replica's own cache, and everything is saved before the next."""
    from vllm import SamplingParams

    from tests.engine.fleet import drain_saves

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens)
    answers = []
    for prompt in prompts:
        shown = [_image(seed) for seed in prompt["seeds"]]
        inputs = {"prompt": prompt["words"], "multi_modal_data": {"image": shown}}
        [output] = llm.generate([inputs], params, use_tqdm=False)
        drain_saves(llm)
        llm.llm_engine.step()
        llm.reset_prefix_cache()
        answers.append(
            {
                "length": len(output.prompt_token_ids),
                "cached": output.num_cached_tokens,
                "tokens": list(output.outputs[0].token_ids),
            }
        )
    return answers


def _image(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _save(folder: Path) -> None:
    import torch
    import transformers

    vocabulary = [*SPECIAL, *IMAGE, *(f"w{i}" for i in range(WORDS - len(SPECIAL) - len(IMAGE)))]
    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = _tokenizer(ids)
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": SIDE},
        do_image_splitting=False,
    )
    processor = transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    config = transformers.Idefics3Config(
        image_token_id=ids["<image>"],
        scale_factor=2,
        pad_token_id=0,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 16,
            "initializer_range": 0.08,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(vocabulary),
            "hidden_size": 256,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "initializer_range": 0.08,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    )
    torch.manual_seed(20)
    model = transformers.Idefics3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08, generator=generator)
    model.to(torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)


def _tokenizer(ids: dict[str, int]) -> Any:
    import tokenizers
    import transformers

    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(IMAGE),
    )


if __name__ == "__main__":
    _save(Path(sys.argv[1]))
