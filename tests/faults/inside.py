"""What a replica does to itself while the matrix is tried on it: functions for ``Call`` steps.

The fault is in another process; ``control`` is the port of whoever causes
it, who is told ``inject`` and ``mend`` and answers when that is done.
"""

import socket
import time
from typing import Any

from tests.support.servers.redis import wait_until

PAUSE_S = 0.3
"""Longer than a server is left alone here, and than saves give way."""


def begin(_llm: Any) -> None:
    """Do not wait half a minute where a test cannot."""
    from objkv.agent import client, outbox
    from objkv.cache import chunks as repeats
    from objkv.transfer.loading import connection

    repeats.KEEP_S = 0.0
    connection.RETRY_MAX_S = PAUSE_S / 3
    client.RETRY_S = outbox.RETRY_S = PAUSE_S / 3


def tell(_llm: Any, control: int, word: str) -> None:
    """Have ``word`` done; returns when it is."""
    with socket.create_connection(("127.0.0.1", control)) as connection:
        connection.sendall(f"{word}\n".encode())
        answer = connection.makefile().readline().strip()
    assert answer == "done", answer


def pause(_llm: Any) -> None:
    """Until every server that was left alone may be tried again."""
    time.sleep(PAUSE_S)


def attach(_llm: Any) -> None:
    """Wait until loads have a node agent to go to."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    loads = get_kv_transfer_group().worker.loader
    wait_until(lambda: is_attached(loads), "loads to find the agent")


def is_attached(loads: Any) -> bool:
    """Whether loads have a node agent to go to."""
    return loads.agent is not None and not loads.agent.has_ended()
