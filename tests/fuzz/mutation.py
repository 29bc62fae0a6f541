"""How valid bytes and values become invalid ones."""

from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = [0, 1, 2, 31, 127, 128, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
ODD = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.0, -0.5, 1e308, float("nan"),
    float("inf"), "", "U8", "BF16", "none", "\ud800", "\0", "９", "9" * 4400, "../..", "nan", "-1",
    "1e9", [], {},
]  # fmt: skip


def spoiled(random: Random, seeds: Sequence[bytes], near: int | None = None) -> bytes:
    """One of ``seeds`` with a few edits, three of four of them within the first ``near`` bytes."""
    value = bytearray(random.choice(seeds))
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 5))):
        last = max(0, len(value) - 1)
        if near is not None and random.random() < 0.75:
            last = min(last, near)
        at = random.randint(0, last)
        edit = random.randrange(7)
        if edit == 0 and value:
            value[at] ^= 1 << random.randrange(8)
        elif edit == 1 and value:
            value[at] = random.randrange(256)
        elif edit == 2:
            width = random.choice((1, 2, 4, 8))
            number = random.choice([*NUMBERS, len(value)]) % (1 << 8 * width)
            value[at : at + width] = number.to_bytes(width, "little")
        elif edit == 3:
            del value[at : at + random.randint(1, 64)]
        elif edit == 4:
            value[at:at] = random.randbytes(random.randint(1, 32))
        elif edit == 5:
            start = random.randint(0, last)
            value[at:at] = value[start : start + random.randint(1, 64)]
        else:
            digits = str(random.choice([*NUMBERS, -1, 10**25])).encode()
            value[at : at + len(digits)] = digits
    return bytes(value)


def cut(random: Random, data: bytes) -> list[bytes]:
    """``data`` in up to five pieces."""
    edges = sorted(random.randint(0, len(data)) for _ in range(random.randrange(5)))
    pieces = [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def text(random: Random, alphabet: str = "", at_most: int = 12) -> str:
    """Any characters, or those of ``alphabet``."""
    size = random.randint(0, at_most)
    if alphabet:
        return "".join(random.choices(alphabet, k=size))
    tops = random.choices((128, 256, 0x110000), (8, 1, 1), k=size)
    return "".join(chr(random.randrange(top)) for top in tops)


def changed_text(random: Random, before: str) -> str:
    """``before`` with one edit."""
    at = random.randint(0, len(before))
    return before[:at] + text(random, at_most=6) + before[at + random.randint(0, 3) :]


def odd_value(random: Random) -> Any:
    kind = random.randrange(6)
    if kind == 0:
        return [odd_value(random) for _ in range(random.randrange(3))]
    if kind == 1:
        return {text(random, at_most=4): odd_value(random) for _ in range(random.randrange(3))}
    return random.choice(ODD) if kind < 5 else text(random, at_most=8)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in list(items):
        found.append((document, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def change_document(random: Random, document: Any) -> None:
    """Replace, remove, rename or copy a few values anywhere in a JSON value."""
    for _ in range(random.randrange(4)):
        everywhere = places(document)
        if not everywhere:
            return
        container, key = random.choice(everywhere)
        edit = random.randrange(4)
        if edit == 0:
            container[key] = odd_value(random)
        elif edit == 1:
            del container[key]
        elif edit == 2 and isinstance(container[key], str):
            container[key] = changed_text(random, container[key])
        elif isinstance(container, dict):
            container[text(random)] = container[key]
        else:
            container.append(container[key])
