"""Run vLLM engines on this machine's GPU, without objkv and with it, and compare them:
``python -m scripts.gpu_engine``.

Each stage is an engine in a process of its own, and prints each result at once. ``base`` runs
without objkv; ``objkv`` is the same with it; ``big`` has the shape of Llama 3 8B; in ``process``,
EngineCore has a process of its own, as with ``vllm serve``. ``--cpu`` tries the program with a
tiny model, and measures nothing. Exit status: 0 if every stage ended well.

* ``computed``, ``cached``, ``loaded``: times to the first token of a prompt that is computed, is in
  vLLM's own prefix cache, or is loaded by objkv.
* A loaded prompt must have the answer that it had from the prefix cache: both compute the same few
  tokens after the same prefix. ``rounding`` compares them with a prompt that was computed whole,
  whose kernels have other shapes: a difference is shown, not judged.
* ``gaps``: times between tokens of 8 running requests, beside nothing or another long prompt.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from objkv.ops.programs import Program, ProgramFailed
from scripts.gpu_engine.engine import Job

ROOT = Path(__file__).parents[2]
STAGES = {
    "base": Job(has_objkv=False),
    "objkv": Job(),
    "big": Job(shape="8b"),
    "process": Job(own_process=True),
}
STORE_BYTES = 24 << 30
STAGE_S, STAGE_CPU_S = 300, 1200


def run(name: str, job: Job, folder: Path) -> bool:
    """Run one stage; whether it ended well."""
    settings = {
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(job.own_process)),
        "OBJKV_BULK_URL": f"file://{folder}/chunks",
        "OBJKV_INDEX_URL": f"sqlite://{folder}/index.sqlite",
        # What is measured is loading, also where computing would be sooner.
        "OBJKV_ADMISSION": "always",
    }
    if job.shape == "8b":
        # An eighth of the machine's memory may be less than what is saved here.
        settings["OBJKV_AGENT_MEMORY_BYTES"] = "32GiB"
    given = json.dumps(asdict(job) | {"folder": str(folder)})
    arguments = ("-m", "scripts.gpu_engine.engine", given)
    try:
        with Program(name, arguments, folder / "log", settings) as program:
            for line in program.lines(bound_s=STAGE_CPU_S if job.shape == "tiny" else STAGE_S):
                print(f"{name:8}{line}", end="", flush=True)
    except ProgramFailed as exc:
        print(exc.what, exc.tail(), sep="\n", flush=True)
        return False
    return True


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--stages", help=f"of {', '.join(STAGES)}", default=",".join(STAGES))
    parser.add_argument("--lengths", help="of documents, in tokens", default="4096,16384,32768")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, with vLLM for the CPU")
    options = parser.parse_args()
    names = options.stages.split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no payloads stay in memory
    if unknown := set(names) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    lengths, good = tuple(map(int, options.lengths.split(","))), True
    memory = Path("/dev/shm")  # noqa: S108 the disk is not what is measured
    large = memory.is_dir() and shutil.disk_usage(memory).free > STORE_BYTES
    for name in names:
        given = asdict(STAGES[name]) | {"lengths": lengths}
        job = Job(**given | ({"shape": "tiny"} if options.cpu else {}))
        with tempfile.TemporaryDirectory(dir=memory if large else None) as folder:
            good &= run(name, job, Path(folder))
    sys.exit(not good)


if __name__ == "__main__":
    main()
