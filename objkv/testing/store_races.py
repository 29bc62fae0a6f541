"""What every store promises to many threads at once; part of ``StoreContract``."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from objkv.stores.base import PruneStore

T = TypeVar("T")

READERS = 8
WRITERS = 12


def at_once(count: int, call: Callable[[int], T]) -> list[T]:
    """``call(0)`` … ``call(count - 1)``, each on a thread of its own, started at one moment."""
    barrier = threading.Barrier(count)

    def run(number: int) -> T:
        barrier.wait(timeout=60)
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


class StoreRaces:
    """Races, each decided the same way whoever comes first."""

    def test_of_many_writers_exactly_one_wins(self, store: PruneStore) -> None:
        for turn in range(3):
            key = f"race/{turn}"

            def write(number: int, key: str = key) -> bool:
                return store.put_if_absent(key, b"%02d" % number * 50_000)

            won = at_once(WRITERS, write)
            assert won.count(True) == 1
            assert store.get(key) == b"%02d" % won.index(True) * 50_000

    def test_readers_see_a_whole_value_or_none(self, store: PruneStore) -> None:
        values = [bytes([number]) * 300_000 for number in range(4)]
        done = threading.Event()

        def read(_: int) -> int:
            torn = 0
            while not done.is_set():
                value = store.get("k")
                torn += value is not None and value not in values
            return torn

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read, number) for number in range(3)]
            try:
                for value in values * 2:
                    store.put("k", value)
                store.delete("k")
                store.put_if_absent("k", values[0])
            finally:
                done.set()
            assert [reader.result() for reader in readers] == [0, 0, 0]

    def test_many_threads_do_not_mix_up_values(self, store: PruneStore) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                key, value = f"t{number}/{turn}", b"%d-%d" % (number, turn)
                assert store.put_if_absent(key, value)
                buffer = bytearray(32)
                assert store.get_into(key, memoryview(buffer)) == len(value)
                assert buffer.startswith(value)
                assert store.get(key) == value
                assert store.delete(key)

        at_once(WRITERS, work)
        assert list(store.scan("")) == []
