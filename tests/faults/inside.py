"""What a replica does to itself while the matrix is tried on it: functions for ``Call`` steps.

The fault is in another process; ``control`` is the port of whoever causes
it, who is told ``inject`` and ``mend`` and answers when that is done.
"""

import logging
import socket
import time
from typing import Any

from tests.engine.replica import read_metrics
from tests.faults.seen import Lines
from tests.support.paged_cache import forget_all
from tests.support.servers.redis import wait_until

PAUSE_S = 0.3
"""Longer than a server is left alone here, and than saves give way."""
_PREFIX = "vllm:objkv_"
_lines = Lines()
_before: dict[str, float] = {}
_fired = False


def begin(_llm: Any) -> None:
    """Keep the lines; do not wait half a minute where a test cannot."""
    from objkv.agent import calls, outbox
    from objkv.cache import chunks as repeats
    from objkv.cache import saving as save_crew
    from objkv.transfer.loading import loader

    logging.getLogger("objkv").addHandler(_lines)
    repeats.KEEP_S = 0.0
    save_crew._SHED_S = PAUSE_S / 3
    loader._RETRY_MAX_S = PAUSE_S / 3
    calls._RETRY_S = outbox._RETRY_S = PAUSE_S / 3


def tell(_llm: Any, control: int, word: str) -> None:
    """Have ``word`` done; returns when it is."""
    with socket.create_connection(("127.0.0.1", control)) as connection:
        connection.sendall(f"{word}\n".encode())
        answer = connection.makefile().readline().strip()
    assert answer == "done", answer


def at_load(llm: Any, control: int, word: str) -> None:
    """Have ``word`` done once, when the next load was planned and has not begun."""
    global _fired
    _fired = False
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    plan_step = type(side).plan_step.__get__(side)

    def planned(output: Any) -> Any:
        global _fired
        plan = plan_step(output)
        if plan.loads:
            _fired = True
            del side.plan_step
            tell(llm, control, word)
        return plan

    side.plan_step = planned


def note(llm: Any) -> dict[str, Any]:
    """What was counted and logged since the last time; whether ``at_load`` saw a load."""
    now = {
        name.removeprefix(_PREFIX): value
        for name, value in read_metrics(llm).items()
        if name.startswith(_PREFIX)
    }
    counted = {name: value - _before.get(name, 0) for name, value in now.items()}
    _before.update(now)
    lines = list(_lines.lines)
    _lines.lines.clear()
    return {
        "counted": {name: value for name, value in counted.items() if value},
        "lines": lines,
        "fired": _fired,
    }


def disarm(llm: Any) -> None:
    """No load was planned: nothing is to be done at the next one."""
    side = llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    side.__dict__.pop("plan_step", None)


def pause(_llm: Any) -> None:
    """Until every server that was left alone may be tried again."""
    time.sleep(PAUSE_S)


def attach(_llm: Any) -> None:
    """Wait until loads have a node agent to go to."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    loads = get_kv_transfer_group().worker.loads
    wait_until(lambda: is_attached(loads), "loads to find the agent")


def core_of(loads: Any) -> Any:
    """What fetches in this process for these loads; None if a node agent does."""
    return getattr(loads.agent, "core", None)


def forget(_llm: Any) -> None:
    """Let this process have no payload in memory, so that each load asks the stores."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if (core := core_of(get_kv_transfer_group().worker.loads)) is not None:
        forget_all(core.residents)


def is_attached(loads: Any) -> bool:
    """Whether loads have a node agent to go to."""
    return loads.agent is not None and not loads.agent.has_ended()
