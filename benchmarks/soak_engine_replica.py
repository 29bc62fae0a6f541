"""The real engines of a soak, forked from one process that has imported vLLM.

``python -m benchmarks.soak_engine_replica`` reads the name of a job file per line and forks an
engine for each; it ends with its standard input. An engine writes one JSON line per second to its
own file.
"""

import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run by its path
    sys.path.insert(0, str(ROOT))

TELL_S = 1.0
END_S = 20.0
_REFUSED = "are refused, serving without them"


class Replica:
    """One engine with its life, from start to orderly end."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._file = Path(job["status"]).open("a", buffering=1)  # noqa: SIM115  # as long as it lives
        from benchmarks.soak_shared import LoggedErrors

        # What rights lack is reported to the operator as an error, and is wanted here.
        self._errors = LoggedErrors(wanted=_REFUSED)
        logging.getLogger("objkv").addHandler(self._errors)
        from vllm import LLM

        self._llm = LLM(**job["engine"])
        self._started = time.monotonic()
        self._told_s = 0.0

    def run(self) -> None:
        """Answer one by one, or live until the file ``stop`` is there."""
        if self._job.get("answers"):
            self._answer()
        else:
            self._live()

    def _answer(self) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, ignore_eos=True, detokenize=False, max_tokens=self._job["longest"]
        )
        answers = []
        for prompt in self._job["prompts"]:
            self._llm.reset_prefix_cache()
            inputs: Any = {"prompt_token_ids": prompt}
            (output,) = self._llm.generate([inputs], params, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
        partial = Path(self._job["answers"] + ".partial")
        partial.write_text(json.dumps(answers))
        partial.rename(self._job["answers"])

    def _live(self) -> None:
        from benchmarks.soak_engine_life import Life

        expected_file, stop = Path(self._job["expected"]), Path(self._job["stop"])
        while not expected_file.exists():
            self._tell({})
            time.sleep(0.1)
        expected = json.loads(expected_file.read_text())
        life = Life(self._llm, self._job["prompts"], expected)
        life.seed(self._job["seed"])
        disturb = bool(self._job["disturb"])
        while life.step(more=not stop.exists(), disturb=disturb and not stop.exists()):
            self._tell(life.counts, life.wrong)
        life.end()
        left = self._leftovers()
        self._tell(life.counts, life.wrong, left=left, metrics=self._metrics(), now=True)
        self._llm.llm_engine.engine_core.shutdown()
        self._tell(life.counts, life.wrong, left=left | self._settled(), over=True, now=True)

    def _tell(
        self,
        counts: Mapping[str, int],
        wrong: Any = (),
        *,
        now: bool = False,
        **more: Any,
    ) -> None:
        if not now and time.monotonic() - self._told_s < TELL_S:
            return
        self._told_s = time.monotonic()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        line = {
            "at_s": round(time.time(), 2),
            "pid": os.getpid(),
            "counts": dict(counts),
            "wrong": list(wrong),
            "errors": self._errors.found,
            "rss_mib": pages * resource.getpagesize() / 2**20,
            "files": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            **self._slabs(),
        }
        self._file.write(json.dumps(line | more) + "\n")

    def _slabs(self) -> dict[str, float]:
        """What transfers hold: memory for payloads in all, and how many of them are leased."""
        worker = _worker()
        if worker is None:
            return {"slab_mib": 0.0, "leased": 0}
        pool, inside = worker._saver._slabs, worker._loader._inside
        nbytes, leased = pool.total * pool.slab_bytes, pool.leased
        if inside is not None:
            nbytes += inside.core.residents.total_bytes
            leased += inside.core.residents.leased()
        return {"slab_mib": nbytes / 2**20, "leased": leased}

    def _leftovers(self) -> dict[str, int]:
        """What is still held when nothing is running: all of it should be none."""
        worker = _worker()
        end = time.monotonic() + END_S
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        while worker is not None and worker._loader._jobs and time.monotonic() < end:
            self._llm.llm_engine.step()
        if worker is not None:
            worker._saver.drain(END_S)
        blocks = scheduler.kv_cache_manager.block_pool
        side = scheduler.connector._scheduler
        left = {
            "requests": len(scheduler.requests),
            "blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
            "tracked": len(side._requests.ids()),
            "held": len(side._held),
        }
        if worker is not None:
            left |= {
                "jobs": len(worker._loader._jobs),
                "leased slabs": int(self._slabs()["leased"]),
            }
        return left

    def _settled(self) -> dict[str, int]:
        """Threads and slab pools that are left once the engine has shut down."""
        from objkv.transfer.slabs import SlabPool

        end = time.monotonic() + END_S
        while True:
            gc.collect()
            own = [t.name for t in threading.enumerate() if t.name.startswith("objkv-")]
            pools = sum(pool.leased for pool in gc.get_objects() if isinstance(pool, SlabPool))
            if not (own or pools) or time.monotonic() > end:
                return {"threads": len(own), "leased slabs": pools}
            time.sleep(0.1)

    def _metrics(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import Counter as Counted

        wanted: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counted) and not metric.labels.get("source"):
                wanted[metric.name] = wanted.get(metric.name, 0) + metric.value
        return {name: value for name, value in wanted.items() if value}


def _worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group()._worker if has_kv_transfer_group() else None


def _preload() -> None:
    gc.disable()
    from vllm import LLM

    import objkv.connector  # noqa: F401  # loaded once, before the engines are forked

    assert LLM
    gc.freeze()
    gc.enable()


def _become(job: dict[str, Any]) -> None:
    from objkv.ops.programs import die_with_parent

    die_with_parent()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(job["environment"])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    status = 1
    try:
        Path(job["pid"]).write_text(str(os.getpid()))
        Replica(job).run()
        status = 0
    except BaseException:
        faulthandler.dump_traceback(all_threads=True)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        Path(job["ended"]).write_text(str(status))
        os._exit(status)


def main() -> None:
    """Fork an engine for each line, until there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who end
    _preload()
    print("ready", flush=True)
    while True:
        if not (line := sys.stdin.readline().strip()):
            return
        job = json.loads(Path(line).read_text())
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become(job)


if __name__ == "__main__":
    main()
