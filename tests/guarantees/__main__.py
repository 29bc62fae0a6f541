"""Break each guarantee in a copy of the tree, and see that its tests fail.

    python -m tests.guarantees [--jobs 2] [--only WORD] [--stale]

Every ``*.toml`` beside this file lists guarantees, each called as the file that its edit changes:

    [["objkv/codec/payload.py"]]
    says = "A payload with a wrong checksum is a miss."
    find = "text that occurs once in the file"
    replace = "what breaks the guarantee, nothing if that is left out"
    tests = "tests/codec/test_payload.py -k checksum"
"""

import argparse
import compileall
import concurrent.futures
import multiprocessing
import os
import py_compile
import queue
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.guarantees.child import PRINTED, run_tests

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# What tests read; the rest of a checkout is large.
COPIED = (
    *("objkv", "tests", "benchmarks", "scripts", "examples", "docs"),
    *("pyproject.toml", "Makefile"),
)
LIMIT_S = 120


@dataclass(frozen=True)
class Guarantee:
    """One sentence, the edit that breaks it, and the arguments of pytest that notice."""

    area: str
    says: str
    file: str
    find: str
    tests: str
    replace: str = ""

    def breaks(self, root: Path) -> str:
        """The text of the file with the edit.

        Raises:
            ValueError: The edit does not fit the code any more.
        """
        text = (root / self.file).read_text()
        if text.count(self.find) != 1:
            raise ValueError(f"the text to change occurs {text.count(self.find)} times")
        return text.replace(self.find, self.replace)


def guarantees() -> list[Guarantee]:
    """All of them."""
    return [
        Guarantee(area=path.stem, file=file, **entry)
        for path in sorted(HERE.glob("*.toml"))
        for file, entries in tomllib.loads(path.read_text()).items()
        for entry in entries
    ]


def stale(found: list[Guarantee]) -> list[str]:
    """What no longer fits: an edit, or a file of tests."""
    findings = []
    for one in found:
        try:
            one.breaks(ROOT)
        except (ValueError, OSError) as error:
            findings.append(f"{one.area}: {one.says} ({one.file}: {error})")
        findings += [
            f"{one.area}: {one.says} ({word} does not exist)"
            for word in shlex.split(one.tests)
            if word.startswith("tests/") and not (ROOT / word.partition("::")[0]).exists()
        ]
    return findings


def verdict(one: Guarantee, tree: Path) -> str:
    """``found``, or why the tests did not notice the edit."""
    target = tree / one.file
    before = target.read_text()
    try:
        target.write_text(one.breaks(tree))
        (tree / PRINTED).write_text("")
        run = _FORKS.Process(target=run_tests, args=(tree, shlex.split(one.tests)))
        run.start()
        run.join(LIMIT_S)
        too_slow = run.exitcode is None
        with suppress(ProcessLookupError):  # with what its tests have started
            os.killpg(run.pid, signal.SIGKILL)
        run.join()
    except ValueError as error:
        return str(error)
    finally:
        target.write_text(before)
    if too_slow:
        return f"TOO SLOW (over {LIMIT_S} s)"
    # 1: tests failed. 2: the edit stops the import of a test, which proves nothing.
    last = (tree / PRINTED).read_text().strip().rpartition("\n")[2]
    return "found" if run.exitcode == 1 else f"NOT FOUND (exit {run.exitcode}: {last})"


# Children of a process that has imported what most tests need: half of a run's time.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["boto3", "hypothesis", "moto", "pydantic", "pytest", "redis", "torch", "vllm.config"]
)


def main() -> int:
    """Exit status 1 if any edit goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="a word of the sentence, area or file")
    parser.add_argument("--stale", action="store_true", help="only see that all edits still fit")
    asked = parser.parse_args()
    chosen = [
        one
        for one in guarantees()
        if asked.only.lower() in f"{one.area} {one.says} {one.file}".lower()
    ]
    findings = stale(chosen)
    print(*findings, sep="\n", end="\n" if findings else "")
    if asked.stale:
        return bool(findings)

    missed = 0
    with tempfile.TemporaryDirectory(prefix="objkv-guarantees-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(asked.jobs):
            trees.put(_copied(Path(folder) / str(number)))

        def judged(one: Guarantee) -> tuple[Guarantee, str, float]:
            tree, began = trees.get(), time.monotonic()
            try:
                return one, verdict(one, tree), time.monotonic() - began
            finally:
                trees.put(tree)

        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
            for one, said, took in pool.map(judged, chosen):
                missed += said != "found"
                print(f"{said:9} {took:5.1f} s  {one.area}: {one.says}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} guarantees are held by their tests")
    return bool(missed)


def _copied(tree: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    # Python compares the text of a file, not its age: an edit and its end may share a second.
    by_text = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(tree, quiet=2, invalidation_mode=by_text)
    return tree


if __name__ == "__main__":
    sys.exit(main())
