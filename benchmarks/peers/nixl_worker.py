"""NIXL with its OBJ (S3) backend. Runs in NIXL's environment; written for 1.5.1.

Buffers are registered once. Keys are registered in every call, within the measured time, because
every key is new; vLLM's ``obj`` tier does the same.
"""

import time
from collections.abc import Sequence

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from protocol import Servers, Worker, serve

CALL_S = 120.0
POLL_S = 0.0002


class NixlWorker(Worker):
    """One agent with one OBJ backend."""

    def __init__(self) -> None:
        self._registered: list[object] = []

    def open(self, servers: Servers, role: str, threads: int) -> None:
        """Make the agent; it connects with the first call."""
        super().open(servers, role, threads)
        self._agent = nixl_agent(f"bench-{role}", nixl_agent_config(backends=[]))
        self._agent.create_backend(
            "OBJ",
            {
                "endpoint_override": f"http://127.0.0.1:{servers.s3_port}",
                "scheme": "http",
                "bucket": servers.bucket,
                "region": "us-east-1",
                "access_key": "bench",
                "secret_key": "bench",
                "use_virtual_addressing": "false",
                "req_checksum": "required",
                "num_threads": str(threads),
            },
        )

    def prepare(self, value_bytes: int, values: int) -> None:
        """Buffers, registered; those of the size before are given up."""
        for registered in self._registered:
            self._agent.deregister_memory(registered, backends=["OBJ"])
        whole = np.zeros(value_bytes * values, np.uint8)
        place = [(whole.ctypes.data, whole.size, 0, "")]
        self._registered = [self._agent.register_memory(place, "DRAM", backends=["OBJ"])]
        self.buffers = np.split(whole, values)

    def put(self, names: Sequence[str]) -> None:
        """Returns when every upload was acknowledged."""
        self._transfer("WRITE", names)

    def get(self, names: Sequence[str]) -> None:
        """Into the registered buffers."""
        self._transfer("READ", names)

    def lookup(self, names: Sequence[str]) -> int:
        """One call; one HEAD a key inside."""
        asked = [(0, 0, 0, name) for name in names]
        found = self._agent.query_memory(asked, "OBJ", mem_type="OBJ")
        return next((i for i, item in enumerate(found) if item is None), len(found))

    def _transfer(self, direction: str, names: Sequence[str]) -> None:
        buffers = self.buffers[: len(names)]
        keys = [
            (0, b.size, i, name) for i, (b, name) in enumerate(zip(buffers, names, strict=True))
        ]
        registered = self._agent.register_memory(keys, "OBJ", backends=["OBJ"])
        here = self._agent.get_xfer_descs([(b.ctypes.data, b.size, 0) for b in buffers], "DRAM")
        handle = self._agent.initialize_xfer(
            direction, here, registered.trim(), f"bench-{self.role}", backends=["OBJ"]
        )
        try:
            state = self._agent.transfer(handle)
            until = time.monotonic() + CALL_S
            while state == "PROC":
                if time.monotonic() > until:
                    raise TimeoutError(f"{direction} took more than {CALL_S} s")
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"{direction} ended as {state}")
        finally:
            self._agent.release_xfer_handle(handle)
            self._agent.deregister_memory(registered, backends=["OBJ"])


if __name__ == "__main__":
    serve(NixlWorker())
