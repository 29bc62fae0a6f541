"""Which process of xdist runs which files, and in what order.

An engine keeps a core busy, while most other tests wait much of their time, for servers and for
threads. So the first process runs the files that start engines, and the others all others, until
one kind is done. The longest files are first: otherwise one of them runs alone at the end.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling

LONG = (
    "tests/device/test_engine.py",
    "tests/engine/test_servers_http.py",
    "tests/engine/test_quickstart.py",
    "tests/engine/test_warm.py",
    "tests/engine/test_shapes_tp.py",
    "tests/engine/test_agent.py",
    "tests/flow/test_demo_replicas.py",
    "tests/device/test_gpu_check.py",
    "tests/services/test_access_commands.py",
    "tests/ops/bench/test_quick.py",
    "tests/models/test_models.py",
    "tests/connector/kv/test_hybrid_world.py",
    "tests/ops/test_report_browser.py",
    "tests/services/test_upkeep.py",
    "tests/services/test_s3_ceph.py",
    "tests/services/test_access_ceph.py",
    "tests/cli/test_upkeep.py",
    "tests/cli/test_doctor.py",
)
"""Files that take half a minute or more with fewer than a hundred tests; the others go by their
number of tests."""


def starts_engines(file: str) -> bool:
    """Whether a test file is one for the first process."""
    return (
        file.startswith(("tests/engine/", "tests/flow/")) or file == "tests/device/test_engine.py"
    )


class EnginesApart(LoadFileScheduling):
    """``--dist loadfile`` in this order."""

    def _assign_work_unit(self, node: Any) -> None:
        is_first = node is self.nodes[0]
        files: list[str] = list(self.workqueue)
        own = [file for file in files if starts_engines(file) == is_first] or files
        longest = min(own, key=lambda file: LONG.index(file) if file in LONG else len(LONG))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
