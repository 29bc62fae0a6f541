"""Seals: payloads that only holders of a key can make (signed), or read (encrypted).

A seal is None where nobody asked for one: then nothing is signed, checked or encrypted. With one,
whatever is not sealed as it says is refused. Specified in ``docs/format.md``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class SealKey:
    """One key, of one tenant or of all."""

    id: str
    """Stands in payloads, in clear."""
    tenant: str
    """``*``: of every tenant that has none of its own."""
    secret: bytes = field(repr=False)
    """``KEY_BYTES`` random bytes."""


class Seal:
    """What one tenant's payloads are signed and encrypted with. Safe from many threads."""

    def __init__(self, signing: Sequence[SealKey] = (), encryption: Sequence[SealKey] = ()) -> None:
        """The first key of each kind seals, all of them open; without keys of a kind payloads are
        not sealed in that way, and not looked at in that way."""
        assert signing or encryption
        self._signing = {key.id: key for key in reversed(signing)}
        self._encryption = {key.id: key for key in reversed(encryption)}

    @property
    def signs(self) -> bool:
        """Whether payloads are signed, and refused without a signature of a known key."""
        return bool(self._signing)

    @property
    def encrypts(self) -> bool:
        """Whether payloads are encrypted, and refused where a frame is not."""
        return bool(self._encryption)

    def __repr__(self) -> str:
        names = [("signing", self._signing), ("encryption", self._encryption)]
        return f"<Seal {', '.join(f'{n} {list(k)}' for n, k in names if k)}>"
