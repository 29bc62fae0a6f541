"""Runs all targets for some minutes: ``python -m tests.fuzz --minutes 10``.

Each target has a process of its own with little memory, so that what crashes or grows is a finding
like any other. Failing examples are written to ``--failures``; the exit code is 1 if there are any.
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

SPARE_BYTES = 1 << 30
"""Of address space, besides what the process has when it begins."""
SLOW_S = 5.0
"""An example that takes longer is a finding; a busy machine makes one of milliseconds no slower."""
_DYING_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--failures", type=Path, default=Path(".cache/fuzz"))
    parser.add_argument("--only", default="", help="targets whose name has this in it")
    parser.add_argument("--one", type=int, default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one is not None:
        return run_one(chosen.one, chosen.minutes * 60, chosen.seed, chosen.failures)
    return run_all(chosen)


def run_all(chosen: argparse.Namespace) -> int:
    """Every target in turn, for the same time each; a table of what came of it."""
    numbers = [i for i, target in enumerate(TARGETS) if chosen.only in target.name]
    chosen.failures.mkdir(parents=True, exist_ok=True)
    print(f"seed {chosen.seed}; {len(numbers)} targets, {chosen.minutes:g} minutes", flush=True)
    print(f"{'target':32} {'examples':>9} {'slowest':>9}  outcomes", flush=True)
    failed = total = 0
    try:
        for number in numbers:
            said = _in_a_process(number, chosen, chosen.minutes / len(numbers))
            total += said["examples"]
            failed += bool(said["failure"])
            ends = ", ".join(f"{name} {count:,}" for name, count in sorted(said["ends"].items()))
            name, slowest = TARGETS[number].name, f"{said['slowest_s'] * 1000:.1f} ms"
            print(f"{name:32} {said['examples']:>9,} {slowest:>9}  {ends}", flush=True)
            if said["failure"]:
                print(f"  FAILED: {said['failure']}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(f"{total:,} examples, {failed} targets failed", flush=True)
    return 1 if failed else 0


def _in_a_process(number: int, chosen: argparse.Namespace, minutes: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.fuzz", "--one", str(number)]
    command += ["--minutes", str(minutes), "--seed", str(chosen.seed)]
    command += ["--failures", str(chosen.failures)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told, _ = process.communicate(timeout=minutes * 60 + _DYING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return _nothing("does not end: see the last example beside the failures")
        except KeyboardInterrupt:  # the child got it too, and tells what it has
            told, _ = process.communicate(timeout=_DYING_S)
            sys.stdout.write(told)
            raise
    if process.returncode:
        return _nothing(f"ended with {process.returncode}: see the last example")
    return json.loads(told.splitlines()[-1])  # type: ignore[no-any-return]


def _nothing(failure: str) -> dict[str, Any]:
    return {"examples": 0, "slowest_s": 0.0, "ends": {}, "failure": failure}


def run_one(number: int, seconds: float, seed: int, failures: Path) -> int:
    """One target in this process; one line of JSON."""
    target, source = TARGETS[number], random.Random(seed)
    ends: Counter[str] = Counter()
    slowest_s, failure, last = 0.0, "", failures / f"last-{number}.txt"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    log = os.open(last, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    until_s = time.monotonic() + seconds
    try:
        while not failure and time.monotonic() < until_s:
            example = target.make(source)
            # Whoever crashes cannot tell of it: what it crashed on is written down before.
            os.pwrite(log, text := repr(example).encode("utf-8", "backslashreplace"), 0)
            os.ftruncate(log, len(text))
            began = time.perf_counter()
            try:
                ends[target.check(example)] += 1
            except Exception:
                failure = f"{example!r}\n{traceback.format_exc()}"
            took_s = time.perf_counter() - began
            slowest_s = max(slowest_s, took_s)
            if not failure and took_s > SLOW_S:
                failure = f"{example!r}\ntook {took_s:.1f} s"
    except KeyboardInterrupt:
        pass
    if failure:
        path = failures / f"failed-{number}-{seed}.txt"
        path.write_text(failure, errors="backslashreplace")
        failure = f"{failure.strip().splitlines()[-1][:200]} ({path})"
    else:
        last.unlink()
    told = {"examples": ends.total(), "slowest_s": slowest_s, "ends": ends, "failure": failure}
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
