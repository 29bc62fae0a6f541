"""Warm a corpus with Ray Data: its engines compute, and objkv's connector in each engine saves.

python examples/warm/ray_data.py prompts.jsonl --model MODEL --engines 4
"""

import argparse
import json
import sys
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

import objkv


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    """Request one token, because only the KV of the prompt is needed."""
    return {
        "messages": row["messages"],
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0,
            "detokenize": False,
            # Node agents put what is computed here at once.
            "extra_args": {"kv_transfer_params": {"objkv_put": True}},
        },
    }


def postprocess(row: dict[str, Any]) -> dict[str, Any]:
    """Keep only the length of the prompt."""
    return {"tokens": row["num_input_tokens"]}


def main() -> int:
    """Warm the corpus, then check that it is stored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", help="JSON Lines, each with messages")
    parser.add_argument("--model", required=True, help="a folder, or a hub id")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="of vLLM, as JSON")
    parser.add_argument(
        "--resources", type=json.loads, help='of each worker, instead of {"GPU": 1}'
    )
    given = parser.parse_args()

    # Sorted neighbours share prefixes. One engine gets a block of rows and computes a shared prefix
    # once. The engine that gets the next block loads it.
    rows = ray.data.read_json(given.prompts, lines=True).map(
        lambda row: {**row, "order": json.dumps(list(row["messages"]))}
    )
    config = vLLMEngineProcessorConfig(
        model_source=given.model,
        engine_kwargs={
            "kv_transfer_config": {"kv_connector": "ObjKVConnector", "kv_role": "kv_both"},
            **given.engine_args,
        },
        concurrency=given.engines,
        batch_size=32,
        placement_group_config=given.resources and {"bundle_per_worker": given.resources},
        detokenize_stage=False,
        log_engine_metrics=False,  # they require ray[serve]
    )
    warmed = build_processor(config, preprocess, postprocess)(rows.sort("order"))
    tokens = warmed.sum("tokens")
    print(f"computed or loaded {tokens:,} tokens")

    with open(given.prompts, encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    # Ray stops its engines without waiting for saves, so this reports missing prompts.
    with objkv.open(tokenizer=given.model) as client:
        found = [client.match(prompt) for prompt in prompts]
    missing = [one for one in found if one.end not in ("complete", "short")]
    print(f"{len(found) - len(missing):,} of {len(found):,} prompts are stored")
    for one in missing:
        print(one.why)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
