"""How valid bytes and values become invalid ones."""

from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st

NUMBERS = [0, 1, 2, 31, 127, 128, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]

odd_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 1.0, True, "U8", "BF16", "none", ""])
    | st.sampled_from(["\ud800", "\0", "９", "9" * 4400, "../..", "nan", "-1", "1e9"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip


@st.composite
def changed_bytes(draw: st.DrawFn, seeds: Sequence[bytes], near: int | None = None) -> bytes:
    """One of ``seeds`` with a few edits, three of four of them within the first ``near`` bytes."""
    value = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        last = max(0, len(value) - 1)
        if near is not None and draw(st.integers(0, 3)):
            last = min(last, near)
        at = draw(st.integers(0, last))
        edit = draw(st.integers(0, 6))
        if edit == 0 and value:
            value[at] ^= 1 << draw(st.integers(0, 7))
        elif edit == 1 and value:
            value[at] = draw(st.integers(0, 255))
        elif edit == 2:
            number = draw(st.sampled_from([*NUMBERS, len(value)]))
            width = draw(st.sampled_from([1, 2, 4, 8]))
            value[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif edit == 3:
            del value[at : at + draw(st.integers(1, 64))]
        elif edit == 4:
            value[at:at] = draw(st.binary(max_size=32))
        elif edit == 5:
            start = draw(st.integers(0, last))
            value[at:at] = value[start : start + draw(st.integers(1, 64))]
        else:
            digits = str(draw(st.sampled_from([*NUMBERS, -1, 10**25]))).encode()
            value[at : at + len(digits)] = digits
    return bytes(value)


def spoiled(random: Random, seeds: Sequence[bytes], near: int | None = None) -> bytes:
    """As ``changed_bytes``, a hundred times as fast, and nothing that hypothesis could shrink."""
    value = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
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


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in list(items):
        found.append((document, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def change_document(draw: st.DrawFn, document: Any) -> None:
    """Replace, remove, rename or copy a few values anywhere in a JSON value."""
    for _ in range(draw(st.integers(0, 3))):
        everywhere = places(document)
        if not everywhere:
            return
        container, key = draw(st.sampled_from(everywhere))
        edit = draw(st.integers(0, 3))
        if edit == 0:
            container[key] = draw(odd_values)
        elif edit == 1:
            del container[key]
        elif edit == 2 and isinstance(container[key], str):
            container[key] = draw(st.text(max_size=20) | changed_text(container[key]))
        elif isinstance(container, dict):
            container[draw(st.text(max_size=12))] = container[key]
        else:
            container.append(container[key])


@st.composite
def changed_text(draw: st.DrawFn, text: str) -> str:
    """``text`` with one edit."""
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.text(max_size=6)) + text[at + draw(st.integers(0, 3)) :]
