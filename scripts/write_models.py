"""The tables of ``docs/models.md``: what vLLM and objkv make of published models.

``python -m scripts.write_models --record [NAME ...]`` records the answers of the installed vLLM
again, see ``tests/models/record.py``.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from objkv.cache.match import stored_blocks
from objkv.connector.model.groups import Geometry
from scripts.write_cli import item
from tests.models import recorded
from tests.models.recorded import VERSIONS, Model, answers, geometry, models, tier

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


def layers_of(found: Geometry) -> str:
    """Return how many layers have which cache."""
    names = {
        "full": "full", "mla": "latent", "sliding_window": "window", "chunked_local": "local",
        "mamba": "state",
    }  # fmt: skip
    counts = Counter[str]()
    for group in found.groups[: found.target_count]:
        name = f"{names[group.kind]} {group.window}" if group.window else names[group.kind]
        if group.page is not None:
            name = f"{names[group.kind]} page"
        counts[name] += len(group.layers)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def chunk_of(found: Geometry, dtype: str) -> str:
    """Return tokens and bytes of a chunk."""
    total = 0
    for group in found.groups[: found.target_count]:
        blocks = stored_blocks(group, found.chunk_tokens)
        each = group.heads * group.content
        if group.kind != "mamba" and group.page is None:
            each *= _ITEM[dtype] * group.block_size
        total += blocks * each * len(group.layers)
    tokens = "" if found.chunk_tokens == 256 else f"{found.chunk_tokens:,}: "
    return f"{tokens}{total / (1 << 20):,.1f}"


def outcome(model: Model, case: str, version: str) -> tuple[str, Geometry | str]:
    """Return the word of a cell, and what it stands for."""
    answer, asked = answers(model.name)[version][case], model.cases()[case]
    found = geometry(answer, asked)
    if isinstance(found, Geometry):
        return "yes", found
    if found.startswith("vLLM"):
        return "vLLM", found
    return ("tier" if tier(answer, asked) else "no"), found


COLUMNS = """\
| Model | Layers | Chunk, MiB | Except | Drafts |
|---|---|---|---|---|
"""
REFERENCE = "0.32"
"""The version of the table. Others are compared with it."""


def row(model: Model) -> str:
    """Return the row of a model."""
    cases = list(model.cases())
    word, found = outcome(model, "plain", REFERENCE)
    layers, chunk, lacks = "", word, ""
    if isinstance(found, Geometry):
        dtype = answers(model.name)[REFERENCE]["plain"]["dtype"]
        layers, chunk = layers_of(found), chunk_of(found, dtype)
        words = [outcome(model, case, REFERENCE)[0] for case in cases[1:5]]
        named = zip(("TP", "PP", "fp8", "DCP"), words, strict=True)
        lacks = ", ".join(f"{name} ({word})" for name, word in named if word != "yes")
    words = [(case, outcome(model, case, REFERENCE)[0]) for case in cases[5:]]
    drafts = ", ".join(case if word == "yes" else f"{case} ({word})" for case, word in words)
    return f"| {model.title} | {layers} | {chunk} | {lacks} | {drafts} |\n"


def differences() -> Iterator[str]:
    """List what other recorded versions make differently, with the cases of a model together."""
    for model in models().values():
        alike: dict[tuple[str, str], list[str]] = {}
        for version in VERSIONS:
            if version not in answers(model.name):
                yield f"* {version}, {model.title}: unknown, because vLLM needs further libraries\n"
                continue
            for case in model.cases() if version != REFERENCE else ():
                if text := difference(model, case, version):
                    alike.setdefault((text, version), []).append(case)
        for (text, version), cases in alike.items():
            yield item(f"{version}, {model.title} ({'; '.join(cases)}): {text}") + "\n"


def difference(model: Model, case: str, version: str) -> str:
    """Return how a version's answer differs. Empty if it does not."""
    word, found = outcome(model, case, version)
    usual, known = outcome(model, case, REFERENCE)
    if isinstance(found, Geometry) and isinstance(known, Geometry):
        if known.groups == found.groups:
            return ""
        if layers_of(known) == layers_of(found) and block_sizes(known) == block_sizes(found):
            other, name = found.groups[0].layers[0], known.groups[0].layers[0]
            return f"the first layer is `{other}` instead of `{name}`, so replicas share no KV"
        return f"{layers_of(found)}, blocks of {block_sizes(found)} instead of {block_sizes(known)}"
    if word == usual:
        return ""
    return f"*{word}* instead of *{usual}*" + (f": *{found}*" if isinstance(found, str) else "")


def block_sizes(found: Geometry) -> str:
    """Those of all groups, each once."""
    return ", ".join(map(str, sorted({group.block_size for group in found.groups})))


def blocks() -> dict[str, str]:
    """The table of models, and the list of differences."""
    table = COLUMNS + "".join(map(row, models().values()))
    return {"models": table, "differences": "".join(differences()) or "Nothing.\n"}


def record(names: list[str]) -> None:
    """Ask the installed vLLM and keep its answers."""
    import vllm

    from tests.models import record as recorder

    version = ".".join(vllm.__version__.split(".")[:2])
    for name in names or list(models()):
        model = models()[name]
        cases: dict[str, Any] = model.cases()
        try:
            found = {case: recorder.record(model.folder, cases[case]) for case in cases}
        except ImportError as exc:  # of a library that the environment lacks: no answer of vLLM
            print(name, version, "is not recorded:", exc)
            found = {}
        recorded.write(model, version, found)
        print(name, version)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2:])
