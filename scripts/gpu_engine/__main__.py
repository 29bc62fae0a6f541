"""Run a real vLLM engine on this machine, without objkv and with it:
``python -m scripts.gpu_engine``, in the root of the checkout.

With ``--bundle``, vLLM and what it needs come from there (``scripts.gpu_engine.bundle``), and this
interpreter needs PyTorch alone. Each stage is a process with a time limit. One that fails does not
stop the next one, and one for which too little of ``--budget`` is left does not run. Exit status:
0 if all that ran ended well.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.gpu_engine import Job, Results, read, table

ROOT = Path(__file__).parents[2]
NUMBA = "def njit(*args, **named):\n    return args[0] if args and callable(args[0]) else njit\n"
"""vLLM imports numba for speculation, which no stage uses. It refuses a NumPy newer than itself."""
DRIVER = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu")
STORE_BYTES = 24 << 30
PATIENCE = 8
"""A busy CPU takes longer."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A process, and how many seconds it may take, and should have left."""

    arguments: tuple[str, ...]
    limit_s: int
    least_s: int
    job: Job | None = None
    appends: bool = True
    """Whether it appends to the results. The others print theirs."""


ENGINE = ("-m", "scripts.gpu_engine.engine")
STAGES = {
    "facts": Stage(("-m", "objkv.programs.gpu_facts"), 60, 0, appends=False),
    "kernels": Stage(("-m", "scripts.gpu_engine.kernels"), 90, 20),
    "base": Stage(ENGINE, 110, 40, Job()),
    "private": Stage(ENGINE, 120, 40, Job(agent="private")),
    "auto": Stage(ENGINE, 120, 40, Job(agent="auto")),
    "big": Stage(ENGINE, 120, 60, Job(agent="auto", shape="8b")),
    "process": Stage(ENGINE, 120, 50, Job(agent="auto", own_process=True)),
}


ON_CPU = "base,private,auto,process"


def say(text: str) -> None:
    """Print with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


class Run:
    """The run of some stages."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._work: Path = options.work
        self._work.mkdir(parents=True, exist_ok=True)
        options.out.mkdir(parents=True, exist_ok=True)
        self._results, self._logs = options.out / "results.jsonl", options.out / "logs.txt"
        for path in (self._results, self._logs):
            path.unlink(missing_ok=True)
        self._attention = "FLASH_ATTN"
        self._end = time.monotonic() + options.budget

    def stages(self) -> bool:
        """Run all; whether they ended well."""
        good = True
        if self._options.bundle:
            self._unpack()
        if subprocess.run([sys.executable, "-c", "import numba"], capture_output=True).returncode:
            (self._work / "stand-in").mkdir(exist_ok=True)
            (self._work / "stand-in" / "numba.py").write_text(NUMBA)
        memory = Path("/dev/shm")  # noqa: S108 the disk is not what is measured
        large = memory.is_dir() and shutil.disk_usage(memory).free > STORE_BYTES
        with tempfile.TemporaryDirectory(dir=memory if large else None) as folder:
            for name in self._options.stages:
                stage, left_s = STAGES[name], self._end - time.monotonic()
                if left_s < stage.least_s:
                    Results(self._results, name).add("skipped", left_s=round(left_s))
                    good = False
                    continue
                limit_s = min(left_s, stage.limit_s * (PATIENCE if self._options.cpu else 1))
                good &= self._stage(name, stage, Path(folder, name), limit_s)
        print(table(read(self._results)), flush=True)
        return good

    def _unpack(self) -> None:
        """Unpack the bundle and compile its modules, once."""
        site = self._work / "site"
        if site.exists():
            return
        with tempfile.TemporaryDirectory(dir=self._work) as partial:
            with tarfile.open(self._options.bundle) as tar:
                tar.extractall(partial, filter="data")
            compiled = [sys.executable, "-m", "compileall", "-q", "-j0", f"{partial}/site"]
            subprocess.run(compiled, stdout=subprocess.DEVNULL, check=False)
            Path(partial, "site").rename(site)
        say("unpacked")

    def _stage(self, name: str, stage: Stage, store: Path, limit_s: float) -> bool:
        say(f"{name}: at most {limit_s:.0f} s")
        store.mkdir()
        arguments, began = [str(self._results)] if stage.appends else [], time.monotonic()
        if stage.job:
            job = asdict(stage.job) | {"attention": self._attention, "cpu": self._options.cpu}
            job |= {"stage": name, "folder": str(self._work), "store": str(store)}
            if self._options.lengths:
                job["lengths"] = [int(n) for n in self._options.lengths.split(",")]
            if self._options.cpu:
                job["shape"] = "tiny"
            arguments.append(json.dumps(job))
        with tempfile.TemporaryDirectory() as runtime, self._logs.open("ab") as log:
            log.write(f"\n======== {name}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                [sys.executable, *stage.arguments, *arguments],
                env=self._environment(stage, store, runtime),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = "time limit"
            finally:
                end_all(runtime)
                process.kill()
                process.wait()
        shutil.rmtree(store)
        seconds = round(time.monotonic() - began, 1)
        Results(self._results, name).add("stage", code=code, seconds=seconds)
        say(f"{name}: {code or 'ok'} after {seconds:.0f} s")
        if code or not stage.appends:
            with self._logs.open("rb") as log:
                log.seek(start)
                print(*log.read().decode(errors="replace").splitlines()[-40:], sep="\n")
        checked = [row for row in read(self._results) if "FA3" in row.get("name", "")]
        if name == "kernels" and (code or not all(row["ok"] for row in checked)):
            say("FlashAttention 3 is not right here: using Triton's attention")
            self._attention = "TRITON_ATTN"
        return not code

    def _environment(self, stage: Stage, store: Path, runtime: str) -> dict[str, str]:
        path = (ROOT, self._work / "stand-in", self._work / "site")
        found = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            # Private, so that the processes of a stage can be found by it.
            "XDG_RUNTIME_DIR": runtime,
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self._work / "vllm"),
            "TRITON_CACHE_DIR": str(self._work / "triton"),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it needs FlashInfer
            "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",  # it compiles something at import
            # PyTorch 2.11 cannot use CUDA in a process that was forked after importing vLLM.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        if job := stage.job:
            found["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(job.own_process))
            found["OBJKV_BULK_URL"] = f"file://{store}/chunks"
            found["OBJKV_INDEX_URL"] = f"sqlite://{store}/index.sqlite"
            # What is measured is loading, also where computing would be sooner.
            found["OBJKV_ADMISSION"] = "always"
            if job.agent:
                found["OBJKV_AGENT"] = job.agent
            if job.shape == "8b" and not self._options.cpu:
                # An eighth of the machine's memory may be less than what is saved here.
                found["OBJKV_AGENT_MEMORY_BYTES"] = "32GiB"
        # vLLM takes a machine for one with CUDA if it can load NVML.
        driver = [folder for folder in DRIVER if Path(folder, "libnvidia-ml.so.1").exists()]
        given = os.environ.get("LD_LIBRARY_PATH")
        if driver:
            found["LD_LIBRARY_PATH"] = os.pathsep.join([driver[0], *([given] if given else [])])
        return os.environ | found


def end_all(runtime: str) -> None:
    """Kill the processes of a stage, engines and agents, by a variable in their environment."""
    variable = f"XDG_RUNTIME_DIR={runtime}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended
            continue


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--budget", type=float, default=440, help="seconds for all stages")
    parser.add_argument("--bundle", type=Path, help="site.tar.xz of scripts.gpu_engine.bundle")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "gpu-engine"))
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "gpu-engine")
    parser.add_argument("--lengths", help="of documents, in tokens, such as 4096,16384")
    parser.add_argument("--cpu", action="store_true", help="a tiny model, with vLLM for the CPU")
    options = parser.parse_args()
    if options.cpu:
        options.budget *= PATIENCE
    options.stages = (options.stages or (ON_CPU if options.cpu else ",".join(STAGES))).split(",")
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    options.work, options.out = options.work.resolve(), options.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(not Run(options).stages())


if __name__ == "__main__":
    main()
