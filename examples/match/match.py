"""Print how much of a prompt is stored, as a router would find out, without vLLM or a GPU.

    python match.py 17 4 93 ...         # token ids from the replica's tokenizer

The settings are those of replicas and the ``objkv`` command: ``OBJKV_*`` or a file.
"""

import sys

import objkv


def main() -> None:
    """Print one line per namespace, which means per model and layout."""
    tokens = [int(word) for word in sys.argv[1:]]
    if not tokens:
        sys.exit("give token ids: python match.py 17 4 93 ...")
    with objkv.open() as client:
        namespaces = [one for one in client.namespaces() if one.problem is None]
        if not namespaces:
            print("nothing is stored yet")
        for one in namespaces:
            found = client.match(tokens, namespace=one.name)
            print(f"{one.model} {one.name}: {found.tokens} of {found.prompt_tokens} tokens")
            print(f"  {found.why}")


if __name__ == "__main__":
    main()
