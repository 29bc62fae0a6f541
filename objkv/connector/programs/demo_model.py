"""The demo's model: random weights of a small Llama, made on the spot and kept.

``python -m objkv.connector.programs.demo_model FOLDER SIZE`` makes it and prints a JSON document:
where it is, and what it would run on.

Weights are drawn with a standard deviation of 0.08 instead of the usual 0.02: such a model
answers with other tokens when its KV is wrong, so equal answers are evidence of equal KV.
"""

import hashlib
import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from objkv.ops.demo.job import SCALES, VOCABULARY, Size

_SHAPES: Final[dict[Size, dict[str, int]]] = {
    "normal": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4},
    "small": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
}
_HEAD = 64


def make_model(folder: Path, size: Size) -> Path:
    """Make the model in ``folder`` unless it is there; of many makers each sees a whole one."""
    recipe = Path(__file__).read_bytes() + version("transformers").encode()
    target = folder / f"{size}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    if target.exists():
        return target
    partial = target.with_suffix(f".{os.getpid()}")
    _save(size, partial)
    try:
        partial.rename(target)
    except OSError:  # Another process was first; models are made from a seed and equal.
        shutil.rmtree(partial)
    return target


def device() -> str:
    """What vLLM runs on here: the name of the GPU, or of the processor."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else 'a CPU'}"


def _save(size: Size, folder: Path) -> None:
    import torch
    import transformers

    shape = _SHAPES[size]
    torch.manual_seed(20)
    config = transformers.LlamaConfig(
        **shape,
        vocab_size=VOCABULARY,
        num_attention_heads=shape["hidden_size"] // _HEAD,
        num_key_value_heads=2,
        head_dim=_HEAD,
        max_position_embeddings=SCALES[size].longest,
        initializer_range=0.08,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    folder.mkdir(parents=True)
    model.to(torch.float32).save_pretrained(folder)


def main() -> None:
    """Make the model, say where it is and what it would run on."""
    folder, size = Path(sys.argv[1]), sys.argv[2]
    assert size in SCALES
    from vllm import __version__

    made = make_model(folder, size)
    print(json.dumps({"folder": str(made), "engine": f"vLLM {__version__}", "device": device()}))


if __name__ == "__main__":
    main()
