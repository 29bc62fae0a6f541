"""What an ordering rig with a node agent finds: the transfer code without one of its edges."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tests.device import gpu_order
from tests.device.mutants import mutant
from tests.device.ordering.agent import agent_rig


@contextmanager
def by_agent(way: str) -> Iterator[None]:
    """Let scenarios run on a rig with an agent, whose memory the device reads in this way."""
    with patch.object(gpu_order, "OrderRig", agent_rig(way)):
        yield


_LOADER = "transfer.loading.loader:"
_REGISTRATION = "transfer.registration:"
AGENT_MUTANTS = {
    mutant(
        "leases end before their copies",
        "memory reused",
        _LOADER + "Loader._advance",
        "if one.is_copied and _is_past(one.writer.mark):",
        "if one.is_copied:",
    ): "registered",
    mutant(
        "leases of a lost connection end before their copies",
        "connection lost",
        _LOADER + "Loader._lose",
        "keep = keep or not self._await(marks)",
    ): "registered",
    mutant(
        "an arena is unmapped while it is registered",
        "connection lost",
        _LOADER + "Loader._leave",
        "self._on_device.detach(agent.close)",
        "agent.close()",
    ): "registered",
    mutant(
        "an arena stays registered",
        "connection lost",
        _REGISTRATION + "Windows._work",
        "for undo in self._undo.values():",
        "for undo in ():",
    ): "registered",
    mutant(
        "an arena is unmapped before it is unlocked",
        "connection lost",
        _REGISTRATION + "Windows.close",
        "if self._thread is not None:",
        "if False:",
    ): "registered",
    mutant(
        "windows are read before they are registered",
        "memory reused, whole blocks",
        _REGISTRATION + "Windows.has",
        "number in self._undo",
        "number in self._known",
    ): "refused",
    mutant(
        "frames across a window that is not registered are read in place",
        "memory reused, whole blocks",
        _REGISTRATION + "Windows.has",
        "if all(",
        "if any(",
    ): "registering",
    mutant(
        "copies of whole blocks span two windows",
        "memory reused, whole blocks",
        "transfer.devices:DeviceLane._copy_blocks",
        "rows = _cut_rows(rows, self._seam)",
    ): "registered",
    mutant(
        "frames are read in place where the device refuses",
        "memory reused, whole blocks",
        _REGISTRATION + "DeviceFrames.take",
        "if windows.has(start, len(memory)):",
        "if True:",
    ): "refused",
    mutant(
        "slabs of an arena's frames are free before their copies",
        "memory reused",
        _LOADER + "_Reading._write",
        "slab.release_after(mark)",
        "slab.release()",
    ): "refused",
    mutant(
        "payloads that wait for a slab count as copied",
        "memory reused",
        _LOADER + "Loader._read",
        "one.is_stalled = True",
        "self._done(one)",
    ): "refused",
}
"""Mutants, and the way in which the device reads the arena when they are found."""
