"""Compute prefixes ahead, for instance at night: replicas then load them from the first request on.

    OBJKV_BULK_URL=s3://bucket/prefix OBJKV_INDEX_URL=rediss://redis:6379/0 \\
        python examples/warm_from_batch.py MODEL prefixes.jsonl

``prefixes.jsonl`` holds one JSON text per line. The role ``kv_producer`` saves and never loads, so
what is stored already is computed once more, but not stored twice.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Run every prefix through the engine; one generated token is the least it can do."""
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/warm_from_batch.py MODEL prefixes.jsonl")
    from vllm import LLM, SamplingParams

    model, file = sys.argv[1:]
    prompts = [json.loads(line) for line in Path(file).read_text().splitlines()]
    llm = LLM(
        model=model,
        kv_transfer_config={"kv_connector": "ObjKVConnector", "kv_role": "kv_producer"},
    )
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1))
    tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    # The last saves are under way: an orderly end waits for them (drain_deadline_ms).
    llm.llm_engine.engine_core.shutdown()
    print(f"{len(outputs)} prefixes, {tokens} tokens")


if __name__ == "__main__":
    main()
