"""Kills savers, sweeps, rebuilds and servers again and again, and looks at what is left each time.

``python -m tests.crash.run --rounds 1000`` runs them in a folder with SQLite, in a folder that is
its own index, and in Valkey with an S3 server in memory. It stops at the first thing that must not
be, and says which round it was: ``--seed`` repeats it.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.crash.clients import Violation
from tests.crash.places import Place, folder_place, quick_place
from tests.crash.rounds import Rounds, Seen

Open = Callable[[], AbstractContextManager[Place]]
PLACES: dict[str, Open] = {
    "folder": folder_place,
    "own-index": lambda: folder_place(own_index=True),
    "servers": quick_place,
}


def run_place(name: str, rounds: int, seed: int) -> Seen:
    with PLACES[name]() as place:
        work = Rounds(place, seed)
        for number in range(rounds):
            try:
                work.run()
            except Violation as exc:
                raise Violation(f"{name}, seed {seed}, round {number}: {exc}") from exc
        return work.seen


def run(rounds: int, seed: int) -> None:
    for name in PLACES:
        print(name, run_place(name, rounds // len(PLACES), seed), flush=True)


def command(text: str | None, run: Callable[[int, int], None]) -> int:
    """Run the rounds that the command line asks for; its exit status."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--rounds", type=int, default=1000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    try:
        run(given.rounds, given.seed)
    except Violation as exc:
        print(f"VIOLATION: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command(__doc__, run))
