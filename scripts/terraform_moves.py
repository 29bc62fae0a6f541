"""Reads a plan of ``terraform show -json`` from state that was there before modules were cut, and
says whether all of it moved and nothing was changed, deleted or made anew.

Needs nothing but Python; ``scripts/terraform_check.sh`` calls it.
"""

import json
import sys
from typing import Any


def findings(plan: dict[str, Any]) -> tuple[int, list[str]]:
    """How many resources moved, and a line for each that did not merely move."""
    moved, wrong = 0, []
    for one in plan.get("resource_changes", ()):
        actions = one["change"]["actions"]
        if actions != ["no-op"]:
            before, after = (one["change"][when] or {} for when in ("before", "after"))
            names = [name for name in before if before[name] != after.get(name)]
            wrong.append(f"{one['address']}: {' and '.join(actions)} ({', '.join(names)})")
        elif "previous_address" not in one:
            wrong.append(f"{one['address']}: was there before, at the same place")
        else:
            moved += 1
    return moved, wrong


def main() -> int:
    """0 if everything moved, else 1."""
    moved, wrong = findings(json.load(sys.stdin))
    if not moved:
        wrong.append("nothing moved at all")
    print("\n".join(wrong) if wrong else f"{moved} moved")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
