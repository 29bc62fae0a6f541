"""A tiny random model that sees, made on the spot, and what replicas with it do.

Idefics3: the one family whose processor runs without torchvision. An image is 64 by 64 pixels of
noise, 7 tokens of the prompt, and 4 rows of 256 numbers when it is encoded. Weights are drawn as
those of ``tests.engine.model``: with another image the greedy tokens are others, so equal tokens
are evidence of equal encoder outputs.

The functions at the end are for ``Call`` steps: they run in the replica and take its ``llm``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engine import fleet, model
from tests.engine.fleet import SharedStore
from tests.engine.job import Call, Job, Step, call

EMBEDS, WIDTH = 4, 256
"""Of an image's output, float32."""
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
_IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_WORDS = 1000
_PIXELS = 64
PATIENT = {
    "lookup_deadline_ms": 150_000,
    "save_deadline_ms": 600_000,
    "drain_deadline_ms": 120_000,
}
"""A busy machine must not change what is encoded."""
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "limit_mm_per_prompt": {"image": 2},
}


def make() -> Path:
    return model.make_once(model.place("idefics3", __file__), _save)


def _save(target: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    names = [*_SPECIAL, *_IMAGE_TOKENS, *(f"w{i}" for i in range(_WORDS))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=_IMAGE_TOKENS,
    )
    edge = {"longest_edge": _PIXELS}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=EMBEDS)
    torch.manual_seed(21)
    text = {
        "vocab_size": len(names),
        "hidden_size": WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": _PIXELS,
        "patch_size": 16,
        "initializer_range": 0.08,
    }
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**text),
        vision_config=vision,
        scale_factor=2,
        image_token_id=names.index("<image>"),
        pad_token_id=0,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    made = transformers.Idefics3ForConditionalGeneration(config)
    target.mkdir(parents=True)
    made.to(torch.float32).save_pretrained(target)
    processor.save_pretrained(target)


def job(
    *steps: Step,
    transfer: dict[str, Any] | None = None,
    kv: dict[str, Any] | None = None,
    **more: Any,
) -> Job:
    """A replica with the model. ``transfer``: its ``ec_transfer_config``; ``kv``: its
    ``kv_transfer_config``; ``more``: fields of ``Job``."""
    engine = ENGINE | {"model": str(make())} | more.pop("engine", {})
    if transfer is not None:
        engine["ec_transfer_config"] = transfer
    return Job(steps=steps, connector=kv, engine=engine, **more)


def encoder(store: SharedStore) -> dict[str, Any]:
    """``ec_transfer_config`` on the store."""
    transfer = {"ec_connector": "ObjKVECConnector", "ec_role": "ec_both"}
    return transfer | {"ec_connector_extra_config": store.places | PATIENT}


def see(*prompts: Sequence[int], head: int = 12, tail: int = 1) -> Call:
    """Prompts by the seeds of their images, one after the other; see ``look_at``."""
    return call(look_at, prompts=[list(seeds) for seeds in prompts], head=head, tail=tail)


def look_at(llm: Any, prompts: list[list[int]], head: int, tail: int) -> dict[str, Any]:
    """Generate for each prompt: ``head`` words, its images, ``tail`` words.

    What was generated, how many prompt tokens were cached, how many images were encoded: in this
    process, so that it is 0 where workers have one of their own.
    """
    from vllm import SamplingParams

    calls = _count_encoded(llm)
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=8)
    found: dict[str, Any] = {"tokens": [], "cached": [], "finished": []}
    for seeds in prompts:
        words = [f"w{i}" for i in range(head + tail)]
        text = " ".join([*words[:head], *["<image>"] * len(seeds), *words[head:]])
        prompt = {"prompt": text, "multi_modal_data": {"image": [picture(s) for s in seeds]}}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        made = output.outputs[0] if output.outputs else None
        found["tokens"].append(list(made.token_ids) if made else [])
        found["finished"].append(made.finish_reason if made else None)
        found["cached"].append(output.num_cached_tokens)
    drain_saves(llm)
    return found | {"encoded": len(calls)}


def picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (_PIXELS, _PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def drain_saves(llm: Any) -> None:
    """Wait until this process saves nothing any more, nor a worker of its engine."""
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

    if has_ec_transfer():
        writer = getattr(getattr(get_ec_transfer(), "worker", None), "writer", None)
        assert writer is None or writer.drain(300)
    if hasattr(llm.llm_engine.engine_core, "engine_core"):
        fleet.drain_saves(llm)


def zero_loads(_llm: Any) -> None:
    """From now on, what is loaded is replaced by zeros: what wrong outputs would do."""
    import torch

    from objkv.connector.encoder.worker import EncoderWorkerSide

    load = EncoderWorkerSide.load

    def zeroed(self: Any, plan: Any, cache: dict[str, Any]) -> None:
        new = plan.loads.keys() - cache.keys()
        load(self, plan, cache)
        cache.update((name, torch.zeros_like(cache[name])) for name in new)

    EncoderWorkerSide.load = zeroed  # type: ignore[method-assign]


def _count_encoded(llm: Any) -> list[int]:
    """Grows by one for each image that the encoder is given from now on, in this process."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    calls: list[int] = []
    if core is None:
        return calls
    cls = type(core.model_executor.driver_worker.model_runner.get_model())
    embed = getattr(cls, "plain_embed_multimodal", cls.embed_multimodal)
    cls.plain_embed_multimodal = embed

    def counted(self: Any, **kwargs: Any) -> Any:
        outputs = embed(self, **kwargs)
        calls.extend(1 for _ in outputs)
        return outputs

    cls.embed_multimodal = counted
    return calls
