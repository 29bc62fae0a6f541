"""Answer questions about documents in one batch, and reuse the KV that the fleet has stored.

    python answer.py MODEL questions.jsonl answers.jsonl [--engine JSON]

A line of ``questions.jsonl`` is ``{"document": FILE, "question": TEXT}``, with a path relative to
``questions.jsonl``. ``--engine`` adds arguments to ``vllm.LLM``: ``{"max_model_len": 4096}``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

CONNECTOR = {"kv_connector": "ObjKVConnector", "kv_role": "kv_both"}


def prompts_of(file: Path) -> list[str]:
    """Return each question after its document, sorted by document.

    The engine then computes each document once even if nothing is stored.
    """
    asked = [json.loads(line) for line in file.read_text().splitlines() if line]
    asked.sort(key=lambda one: str(one["document"]))
    return [
        f"{(file.parent / one['document']).read_text()}\n\n{one['question']}\n" for one in asked
    ]


def answer(model: str, prompts: list[str], engine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers, with the number of cached tokens of each prompt."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, kv_transfer_config=CONNECTOR, **engine)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32))
    answers = [
        {
            "answer": output.outputs[0].text,
            "prompt_tokens": len(output.prompt_token_ids or ()),
            "not_computed": output.num_cached_tokens or 0,
        }
        for output in outputs
    ]
    # A regular shutdown hands the last saves over to the agent (drain_deadline_ms).
    llm.llm_engine.engine_core.shutdown()
    return answers


def main() -> None:
    """Run one batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON")
    given = parser.parse_args()
    answers = answer(given.model, prompts_of(given.questions), given.engine)
    given.answers.write_text("".join(f"{json.dumps(one)}\n" for one in answers))
    tokens = sum(one["prompt_tokens"] for one in answers)
    spared = sum(one["not_computed"] for one in answers)
    print(f"{len(answers)} answers, {spared} of {tokens} prompt tokens were cached")


if __name__ == "__main__":
    main()
