"""One long document, two questions, two engines: the second loads what the first computed.

    python examples/shared_prefix.py Qwen/Qwen2.5-0.5B-Instruct

Nothing is configured: both share a directory below ~/.cache/objkv. Each engine runs in a process of
its own, as replicas do.
"""

import subprocess
import sys

DOCUMENT = " ".join(f"Shelf {shelf} holds {shelf * 7 % 90} boxes." for shelf in range(400))
QUESTIONS = ("How many boxes are on shelf 12?", "Which shelves hold more than 80 boxes?")


def answer(model: str, question: str) -> None:
    """One engine's whole life: one question about the document."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        kv_transfer_config={"kv_connector": "ObjKVConnector", "kv_role": "kv_both"},
    )
    [output] = llm.generate(f"{DOCUMENT}\n\n{question}\n", SamplingParams(max_tokens=32))
    tokens = len(output.prompt_token_ids or ())
    print(f"{question} {output.outputs[0].text.strip()!r}")
    print(f"{output.num_cached_tokens} of {tokens} prompt tokens were not computed")


def main() -> None:
    """Without a question: ask each one of a new process."""
    if len(sys.argv) < 2:
        sys.exit("name a model: python examples/shared_prefix.py MODEL")
    model, *questions = sys.argv[1:]
    if questions:
        answer(model, questions[0])
        return
    for question in QUESTIONS:
        subprocess.run([sys.executable, __file__, model, question], check=True)


if __name__ == "__main__":
    main()
