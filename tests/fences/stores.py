"""The stores that replicas share: others go on while they are called, and some calls fail."""

import random

from objkv.errors import StoreUnavailable
from objkv.stores.base import Arrived, Buffer, PruneStore
from objkv.stores.guarded import GuardedStore
from tests.fences.stage import the_stage

UPLOAD_S = 0.05
FAULTS = ("refused", "lost", "flipped", "short", "broken off", "hangs")


class GateStore(GuardedStore):
    """Others go on before, within and after each call; some calls fail, as the dice say."""

    def __init__(self, inner: PruneStore, faults_of_100: int, dice: random.Random) -> None:
        super().__init__(inner)
        self._faults_of_100, self._dice = faults_of_100, dice

    def get_into(
        self, key: str, buffer: memoryview, arrived: Arrived | None = None, start: int | None = None
    ) -> int | None:
        return self._got(key, start or 0, buffer, arrived)

    def put_if_absent(self, key: str, value: Buffer) -> bool:
        fault = self._begin("put")
        written = False if fault == "lost" else self.inner.put_if_absent(key, value)
        the_stage().wait("sent", lambda: False, UPLOAD_S)
        if fault is not None:
            raise StoreUnavailable("the answer did not come")
        return written

    def _got(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None) -> int | None:
        fault = self._begin("get")
        if fault == "lost":
            return None
        value = (self.inner.get(key) or b"")[start : start + len(buffer)]
        if not value:
            return None
        if fault == "flipped":
            value = bytearray(value)
            value[self._dice.randrange(len(value))] ^= 1 << self._dice.randrange(8)
        if fault == "short":
            value = value[: self._dice.randrange(len(value))]
        half = len(value) * 3 // 4
        for first, end in ((0, half), (half, len(value))):
            buffer[first:end] = value[first:end]
            the_stage().pause("half")
            if arrived is not None and end:
                arrived(end)
            if fault == "broken off":
                raise StoreUnavailable("broken off")
        return len(value)

    def _begin(self, verb: str) -> str | None:
        fault = None
        if self._dice.randrange(100) < self._faults_of_100:
            fault = self._dice.choice(FAULTS)
        the_stage().pause(verb)
        if fault == "hangs":
            the_stage().wait("hangs", lambda: False, 20.0)
        if fault == "refused":
            raise StoreUnavailable("refused")
        return fault
