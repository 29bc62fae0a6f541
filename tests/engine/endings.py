"""What is left of a replica: threads when its engine has stopped, processes when it has ended."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import threading
import time
import warnings
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import objkv
from objkv.stores.base import Buffer
from tests.support.waiting import SERVER_PAUSE_S, wait_for, wait_until

if TYPE_CHECKING:
    from tests.support.nursery import Fork

# Who waits for the end of whom, from the inside: each has time to see the one before it give up.
DRAIN_S = 60
"""objkv, for what it still saves."""
WORKER_S = 120
"""vLLM's engine core, for its workers, which it kills then."""
ENGINE_S = 240
"""vLLM's server or script, for its engine core, which it kills then."""
END_S = 600.0
"""The tests, for all of it; twice ``ENGINE_S`` for an engine that a terminal tells first."""
ORPHANS_S = 60.0
"""What ends after the process that started it: Python's own that cleans up."""
AGAIN_S = 20.0
"""How long an engine that was told to end may take to hear it before it is told again."""
_BEGINS_THREAD = re.compile(r'threading\.py", line \d+ in _bootstrap$')
_JOINS_THREADS = re.compile(r" in (_shutdown|_python_exit)$", re.MULTILINE)
PACKAGE = f"{Path(objkv.__file__).parent}/"
_LINE = re.compile(
    r"\([^()]+ pid=\d+\) (?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d "
    r"\[[^\[\]]+:\d+\] (?P<message>.*)"
)
"""``_FORMAT`` in ``vllm/logger.py``, without colours. It has a logger's file and not its name;
``objkv.connector.guard`` puts objkv's name in front of each message."""
_OWN = re.compile(r"objkv(: | |$)")
"""What objkv logged. A folder may be called objkv as well."""
_SHOWN = re.compile(rf'[ |]*(File "{re.escape(PACKAGE)}|objkv(\.\w+)+(: |$))')
"""A traceback's line with a frame in objkv's code, or an exception of objkv's, whoever logged it.
"""


def objkv_threads_after_shutdown(llm: Any, seconds_max: float = 120.0) -> dict[str, list[str]]:
    """Stop the engine of a replica that runs it in its own process, from a job's ``Call``."""
    before = _objkv_threads()
    llm.llm_engine.engine_core.shutdown()
    deadline = time.monotonic() + seconds_max
    while _objkv_threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    return {"before": before, "after": _objkv_threads()}


def slow_saves(_llm: Any, seconds: float) -> None:
    """From now on a payload takes so long to be put into a folder by this process."""
    from objkv.stores.local import LocalStore

    put_if_absent = LocalStore.put_if_absent

    def slow(self: LocalStore, key: str, value: Buffer) -> bool:
        time.sleep(seconds)
        return put_if_absent(self, key, value)

    LocalStore.put_if_absent = slow  # type: ignore[method-assign]


def give_time_to_end(llm: Any, *, told: bool) -> None:
    """Wait for the engine's processes when this one ends, until they have ended.

    vLLM kills them after 5 s, which on a busy machine says nothing of what they still had to save;
    its setting does not reach the first finalizer to run. And it tells them to end although a
    terminal may have ``told`` them: a SIGTERM that comes while SIGINT is taken note of makes an
    engine wait for itself for ever. Source: vLLM 0.32, ``CoreEngineProcManager`` and
    ``SignalCallback`` in ``v1/engine/utils.py``.
    """
    manager = llm.llm_engine.engine_core.resources.engine_manager
    manager._finalizer.detach()
    wait_s = ENGINE_S if told else 0.0
    manager._finalizer = weakref.finalize(manager, _wait_and_tell, manager.processes, wait_s)


def _wait_and_tell(processes: list[BaseProcess], wait_s: float) -> None:
    from vllm.v1.utils import shutdown

    until = time.monotonic() + wait_s
    for process in processes:
        process.join(max(until - time.monotonic(), 0))
    shutdown(processes, ENGINE_S)


def end_of_script(_llm: Any) -> None:
    """End the process as a script does that says nothing to its engine. The job has no result."""
    raise SystemExit(0)


class EngineTold:
    """Whether the engine core, in a process of its own, has heard that it is to end; call it again
    and again.

    CPython forgets a signal that comes between a thread's last look for signals and its going to
    sleep on a lock, until the thread wakes for another reason: an idle engine never does. That is
    rare, and neither vLLM's nor ours to mend, so what was not heard is said once more.
    """

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._said: float | None = None

    def __call__(self) -> bool:
        log = self._log_file.read_text(errors="replace")
        if "EngineCore: trigger received signal" in log:
            return True
        if "send sigterm to process EngineCore" in log:
            now = time.monotonic()
            self._said = self._said or now
            if now - self._said > AGAIN_S and (found := re.search(r"EngineCore pid=(\d+)", log)):
                self._said = now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(found[1]), signal.SIGTERM)
        return False


def exit_status(process: "subprocess.Popen[bytes] | Fork", log_file: Path) -> int | None:
    """Wait until a process that leads a session has ended, and all others of its session; its exit
    status. The log file is where they write, started with PYTHONFAULTHANDLER.

    What hangs is killed, and its stacks are in the log file. Raises RuntimeError if it is objkv
    that it waited for. Otherwise vLLM hung, which is not ours to mend: a warning, and None.
    """
    leader = process.pid
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(END_S)
        if wait_for(
            lambda: not session_processes(leader), bound_s=ORPHANS_S, pause_s=SERVER_PAUSE_S
        ):
            return status
    said = log_file.read_text(errors="replace")[-4000:]
    stacks = []
    # Children first: some end with their parents, unread.
    for pid in sorted(session_processes(leader), reverse=True):
        before = log_file.stat().st_size
        dump_stacks(pid)
        stacks.append(log_file.read_bytes()[before:].decode(errors="replace"))
    process.wait()
    if any(map(waits_for_objkv, stacks)):
        raise RuntimeError(f"objkv did not end, its stacks are in {log_file}: {said}")
    warnings.warn(f"vLLM did not end, its stacks are in {log_file}", stacklevel=2)
    return None


def waits_for_objkv(stacks: str) -> bool:
    """Whether a process can end only when objkv has done something: its main thread is in objkv's
    code, or waits for all other threads and one of them is there. ``stacks`` are faulthandler's."""
    threads = [
        list(itertools.takewhile(lambda line: line.startswith("  "), said.splitlines()))
        for said in re.split(r"(?:Current thread|Thread) 0x.*\n", stacks)[1:]
    ]
    ours = [thread for thread in threads if any(f'File "{PACKAGE}' in line for line in thread)]
    main = [thread for thread in threads if not _BEGINS_THREAD.search("\n".join(thread))]
    joins = [thread for thread in main if _JOINS_THREADS.search("\n".join(thread))]
    return any(thread in main for thread in ours) or bool(joins and ours)


def objkv_errors(log: str) -> list[str]:
    """What went wrong in objkv. Raises ValueError if the log has no line of objkv's: then it is in
    another format, or objkv did not run."""
    lines = [found for line in log.splitlines() if (found := _LINE.match(line))]
    if not any(_OWN.match(line["message"]) for line in lines):
        raise ValueError("no line of this log is objkv's")
    errors = [line["message"] for line in lines if line["level"] in ("ERROR", "CRITICAL")]
    return [message for message in errors if _OWN.match(message) or _SHOWN.match(message)]


def session_processes(leader: int) -> list[int]:
    """Processes of the session that ``leader`` began which still run, whoever their parent is."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in numbers if _session(pid) == leader]


def kill_session(leader: int) -> None:
    for pid in session_processes(leader):
        os.kill(pid, signal.SIGKILL)


def dump_stacks(pid: int) -> None:
    """End a process that was started with PYTHONFAULTHANDLER; it writes what each of its threads is
    doing. Returns when it is gone, so that two of them do not write at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)
    wait_until(lambda: not _session(pid), f"process {pid} to end")


def _objkv_threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return sorted(name for name in names if name.startswith("objkv"))


def _session(pid: int) -> int:
    """The session of a process; 0 for one that is gone, or ended and not yet waited for."""
    try:
        # After the name, which is in parentheses and may hold anything: state, parent, group.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[3])
