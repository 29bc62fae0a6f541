"""Kills savers, sweeps, rebuilds and servers again and again, and looks at what is left each time.

``python -m tests.crash.run --rounds 1000`` runs them in a folder with SQLite, in a folder that is
its own index, and in Valkey with an S3 server in memory; ``--s3`` in Valkey with Ceph instead. It
stops at the first thing that must not be, and says which round it was: ``--seed`` repeats it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.crash.clients import Violation
from tests.crash.places import Place, ceph_place, folder_place, quick_place
from tests.crash.rounds import Rounds, Seen

Open = Callable[[], AbstractContextManager[Place]]
_TELL_EVERY_S = 10.0


def run_place(
    open_place: Open, rounds: int, seed: int, ends_s: float, *, quiet: bool = False
) -> tuple[str, Seen]:
    """So many rounds, or as many as there is time for."""
    with open_place() as place:
        work = Rounds(place, seed)
        told_s = time.monotonic()
        for number in range(rounds):
            if time.monotonic() > ends_s:
                break
            try:
                work.run()
            except Violation as exc:
                raise Violation(f"{place.name}, seed {seed}, round {number}: {exc}") from exc
            if not quiet and time.monotonic() - told_s > _TELL_EVERY_S:
                told_s = time.monotonic()
                print(f"{place.name}: {number + 1} rounds", file=sys.stderr, flush=True)
        return place.name, work.seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="of all places together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--s3", action="store_true", help="Valkey and Ceph, nothing else")
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most")
    given = parser.parse_args()
    places: list[Open] = [folder_place, lambda: folder_place(own_index=True), quick_place]
    if given.s3:
        places = [ceph_place]
    ends_s, seen = time.monotonic() + given.seconds, []
    try:
        for number, place in enumerate(places):
            share = given.rounds // len(places) + (number < given.rounds % len(places))
            seen.append(run_place(place, share, given.seed, ends_s))
    except Violation as exc:
        print(f"VIOLATION: {exc}", file=sys.stderr)
        return 1
    print(table(seen))
    return 0 if sum(one.rounds.total() for _, one in seen) == given.rounds else 2


def table(seen: list[tuple[str, Seen]]) -> str:
    """Markdown, a row for each place."""
    head = (
        "place", "rounds", "kills", "at distinct calls", "steps hit, of save, sweep, rebuild",
        "indexed, read, right", "missing", "orphans swept", "leftovers swept", "records rebuilt",
    )  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for name, one in seen:
        steps = ", ".join(
            f"{min(one.hit[s], one.steps[s])} of {one.steps[s]}" if s in one.steps else "-"
            for s in ("save", "sweep", "rebuild")
        )
        rows.append(
            (
                name, one.rounds.total(), one.kills, len(one.sites), steps, one.indexed,
                one.missing, one.orphans, one.leftovers, one.restored,
            )
        )  # fmt: skip
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
