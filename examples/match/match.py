"""Print how much of a prompt is stored, as a router would find out, without vLLM or a GPU.

    python match.py 17 4 93 ...         # token ids from the replica's tokenizer

The settings are those of replicas and the ``objkv`` command: ``OBJKV_*`` or a file.
"""

import sys

from objkv.assembly.backends import open_backends
from objkv.config import load_config
from objkv.keys.prefix import PromptExtras
from objkv.ops.backends_view import read_identity
from objkv.ops.match import match_prompt
from objkv.telemetry import NullRecorder


def main() -> None:
    """Print one line per namespace, which means per model and layout."""
    tokens = [int(word) for word in sys.argv[1:]]
    if not tokens:
        sys.exit("give token ids: python match.py 17 4 93 ...")
    with open_backends(load_config(), NullRecorder()) as backends:
        namespaces = backends.index.namespaces()
        if not namespaces:
            print("nothing is stored yet")
        for namespace in namespaces:
            identity = read_identity(backends.bulk, namespace)
            if identity is None:
                continue
            report = match_prompt(backends.index, identity, tokens, PromptExtras())
            print(f"{identity.model} {namespace}: {report.usable_tokens} of {len(tokens)} tokens")


if __name__ == "__main__":
    main()
