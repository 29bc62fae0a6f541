"""Check the repository: ``python -m scripts.checks [NAME ...]``, all checks without a name."""

import sys
import time
from importlib import import_module

CHECKS = ("docs", "examples", "guarantees", "names", "pages", "private", "secrets", "sizes")


def main(names: list[str]) -> int:
    """Exit status 1 if anything is found."""
    if unknown := set(names) - set(CHECKS):
        print(f"no such check: {', '.join(unknown)}. There are {', '.join(CHECKS)}")
        return 2
    total = 0
    for name in names or CHECKS:
        began = time.monotonic()
        found = list(import_module(f"scripts.checks.{name}").findings())
        print(*found, sep="\n", end="\n" if found else "")
        print(f"{name}: {len(found)} findings ({time.monotonic() - began:.0f} s)")
        total += len(found)
    return bool(total)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
