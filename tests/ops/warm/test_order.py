"""Which prompt is computed next."""

import random

from objkv.ops.warm.run import Order, Turn


def names(*letters: str) -> list[bytes]:
    """A prompt's chunks, each named by all before it."""
    return ["".join(letters[: end + 1]).encode() for end in range(len(letters))]


def order_of(*prompts: list[bytes], stored: int = 0) -> Order:
    order = Order()
    for number, prompt in enumerate(prompts):
        order.add(number, prompt, stored)
    return order


def turns(order: Order) -> list[int]:
    """All that may begin now."""
    found = []
    while (turn := order.next()) is not None:
        found.append(turn.number)
    return found


def test_of_prompts_with_a_shared_prefix_one_goes_first_and_alone() -> None:
    order = order_of(names("s", "a"), names("s", "b"), names("s", "c"))
    [first] = turns(order)
    order.end(first, stored=True)
    assert turns(order) == [1, 2]


def test_unrelated_prompts_go_at_once() -> None:
    assert sorted(turns(order_of(names("a"), names("b"), names("c")))) == [0, 1, 2]


def test_the_prefix_that_most_wait_for_goes_first() -> None:
    order = order_of(names("x"), names("y", "1"), names("y", "2"), names("y", "3"))
    assert turns(order) == [1, 0]


def test_each_level_of_a_tree_is_computed_once() -> None:
    prompts = [
        names("s", "t", "1"),
        names("s", "t", "2"),
        names("s", "u", "1"),
        names("s", "u", "2"),
    ]
    order = order_of(*prompts)
    assert turns(order) == [0]
    order.end(0, stored=True)
    assert turns(order) == [1, 2]  # the other branch has one that goes alone
    order.end(2, stored=True)
    assert turns(order) == [3]


def test_when_the_first_fails_another_one_takes_its_place() -> None:
    order = order_of(names("s", "a"), names("s", "b"))
    assert turns(order) == [0]
    order.end(0, stored=False)
    assert turns(order) == [1]
    order.end(1, stored=True)
    assert order.is_empty


def test_a_prompt_that_others_computed_needs_nobody() -> None:
    order = order_of(names("a", "b"), names("a"), names("a", "b"))
    assert order.next() == Turn(0, b"a", 2)
    order.end(0, stored=True)
    assert order.next() == Turn(2, b"a", 0)
    assert order.next() == Turn(1, b"a", 0)
    assert order.is_empty


def test_what_is_stored_already_is_not_waited_for() -> None:
    order = order_of(names("s", "a"), names("s", "b"), stored=1)
    assert turns(order) == [0, 1]


def test_no_chunk_is_ever_computed_by_two_and_all_prompts_get_their_turn() -> None:
    source = random.Random(5)
    for _ in range(50):
        prompts = [
            names(*(source.choice("ab") for _ in range(source.randint(1, 6)))) for _ in range(40)
        ]
        order, under_way, computed, done = (
            order_of(*prompts),
            dict[int, list[bytes]](),
            set[bytes](),
            0,
        )
        while not order.is_empty:
            while (turn := order.next()) is not None:
                if not turn.missing:
                    assert set(prompts[turn.number]) <= computed
                    done += 1
                    continue
                missing = prompts[turn.number][-turn.missing :]
                assert computed.isdisjoint(missing)
                assert all(set(other).isdisjoint(missing) for other in under_way.values())
                under_way[turn.number] = missing
            if not under_way:
                assert order.is_empty
                break
            ended = source.choice(list(under_way))
            claimed, stored = under_way.pop(ended), source.random() < 0.8
            if stored:
                computed |= set(claimed)
            order.end(ended, stored=stored)
            done += 1
        assert done == len(prompts)
