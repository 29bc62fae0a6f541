"""``FlakyStore`` is a good store until a test makes it fail."""

from threading import Event
from unittest.mock import Mock

import pytest

from objkv.errors import StoreUnavailable
from objkv.stores.memory import MemoryStore
from tests.contracts.flaky import FlakyStore
from tests.contracts.store_contract import StoreContract


class TestFlakyStore(StoreContract):
    @pytest.fixture
    def store(self) -> FlakyStore:
        return FlakyStore(MemoryStore())


@pytest.fixture
def store() -> FlakyStore:
    flaky = FlakyStore(MemoryStore())
    flaky.put("k", b"value")
    return flaky


def read_every_way(store: FlakyStore) -> list[bytes | None]:
    buffer = bytearray(8)
    nbytes = store.get_into("k", memoryview(buffer))
    into = None if nbytes is None else bytes(buffer[:nbytes])
    return [store.get("k"), store.get_range("k", 0, 8), into]


def test_it_fails_as_often_as_asked(store: FlakyStore) -> None:
    store.fail_next(StoreUnavailable("down"), times=2)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.get("k")
    assert store.get("k") == b"value"


def test_it_fails_until_it_is_mended(store: FlakyStore) -> None:
    store.fail_until_mended(StoreUnavailable("down"))
    for call in (store.check, lambda: store.get("k"), lambda: list(store.scan(""))):
        with pytest.raises(StoreUnavailable):
            call()
    store.mend()
    store.check()
    assert store.get("k") == b"value"


def test_it_spoils_values_the_same_in_every_way_of_reading(store: FlakyStore) -> None:
    store.flip_bit(9)
    assert read_every_way(store) == [b"vclue"] * 3
    store.truncate(2)
    assert read_every_way(store) == [b"va"] * 3
    store.mend()
    assert read_every_way(store) == [b"value"] * 3


def test_it_loses_values(store: FlakyStore) -> None:
    store.drop("k")
    assert read_every_way(store) == [None] * 3


def test_who_has_arrived_waits_at_the_gate_although_the_store_is_mended_at_once(
    store: FlakyStore,
) -> None:
    gate = Mock(Event)
    store.hold(gate)
    store.arrived = Mock(Event)
    store.arrived.set.side_effect = store.mend
    assert store.get("k") == b"value"
    gate.wait.assert_called_once()
