"""Play interleavings for as long as asked: ``python -m tests.fences --minutes 5``.

First every situation with one preemption, and a share of those with two; then lives at random, by
seeds that are told. ``--seed 17`` plays that one again.
"""

import argparse
import sys
import time

import objkv.connector.kv.worker  # noqa: F401  # before clocks are replaced
from tests.fences.explorer import Found, Tally, listening, play_seed, play_situations

SYSTEMATIC_SHARE = 0.5


def main() -> int:
    """Exit code 1 for the first interleaving that is broken, which is told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--first-seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    tally = Tally()
    try:
        with listening():
            if arguments.seed is not None:
                play_seed(arguments.seed, tally)
            else:
                _many(arguments.minutes * 60, arguments.first_seed, tally)
    except Found as found:
        print(f"broken: {found}")
        return 1
    print(f"nothing was broken: {tally}")
    return 0


def _many(seconds: float, first_seed: int, tally: Tally) -> None:
    since = time.monotonic()
    for preemptions, stride in ((1, 1), (2, 997)):
        for _ in play_situations(
            preemptions=preemptions, tally=tally, stride=stride, first=first_seed
        ):
            if time.monotonic() - since > seconds * SYSTEMATIC_SHARE:
                break
    print(f"{tally.plays} interleavings by system; at random from --seed {first_seed} on")
    seed = first_seed
    while time.monotonic() - since < seconds:
        play_seed(seed, tally)
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
