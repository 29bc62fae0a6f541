"""The benchmark of eviction orders: its orders are what they are called."""

import pytest

from benchmarks.arena import ORDERS, Order, found
from benchmarks.fleet.trace import Request, read_trace


def requests(*prompts: str) -> list[Request]:
    return [Request(0.0, 512 * len(one), tuple(map(ord, one))) for one in prompts]


@pytest.mark.parametrize("kind", ORDERS.values(), ids=ORDERS)
def test_no_order_holds_more_than_there_is_room_for(kind: type[Order]) -> None:
    order = kind(3)
    for block in range(50):
        order.add(block)
        if block % 3 == 0:
            order.use(block)
        assert sum(order.has(one) for one in range(50)) <= 3


def test_the_orders_differ_where_they_should() -> None:
    """Two blocks that recur, among others that do not."""
    prompts = requests(*(f"ab{chr(1000 + n)}{chr(2000 + n)}" for n in range(20)))
    shares = {name: found(kind(4), prompts) for name, kind in ORDERS.items()}
    assert shares["LRU"] == shares["objkv"] == 38 / 80
    once = ["".join(map(chr, range(99 * n, 99 * n + 5))) for n in range(1, 9)]
    scans = requests(*(f"{'ab' * (n % 2)}{one}" for n, one in enumerate(once)))
    assert found(ORDERS["objkv"](6), scans) >= found(ORDERS["LRU"](6), scans)


def test_the_sample_can_be_replayed() -> None:
    part = read_trace()[:200]
    blocks = len({block for request in part for block in request.blocks})
    for kind in ORDERS.values():
        small, large = (found(kind(max(1, int(share * blocks))), part) for share in (0.1, 1.0))
        assert 0 <= small <= large
