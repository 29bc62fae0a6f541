"""From gathered pages to a payload, within one slab."""

from collections.abc import Callable, Mapping
from time import time

from objkv.codec.payload import Claim, Header, Provenance, encode_in_place, header_room
from objkv.codec.seal import Seal
from objkv.transfer.choose import CodecChooser
from objkv.transfer.paging import PagedGroup
from objkv.transfer.plan import SaveMove
from objkv.transfer.slabs import Slab


class Encoder:
    """Makes payloads where their pages lie. Safe from many threads, each with slabs of its own."""

    def __init__(
        self,
        groups: Mapping[int, PagedGroup],
        *,
        codec: str,
        writer: str,
        link: Callable[[], float | None],
        seal: Seal | None = None,
    ) -> None:
        """
        Args:
            codec: an id of the format, or ``auto``.
            link: bytes/s of the way to the bulk store, None while unknown; for ``auto``.
            seal: what payloads are sealed with.
        """
        self._groups = groups
        self._codec = codec
        self._writer = writer
        self._seal = seal
        self._chooser = CodecChooser(link) if codec == "auto" else None

    def room(self, save: SaveMove) -> int:
        """Where in its slab the pages of a chunk must begin."""
        layers = self._groups[save.move.group].layers
        return header_room(layers, tokens=len(save.tokens or ()))

    def encode(self, claim: Claim, save: SaveMove, slab: Slab) -> tuple[memoryview, Header]:
        """The payload, a view of ``slab``, which holds the chunk's pages from ``room`` on."""
        group = self._groups[claim.key.group]
        codec = self._codec
        if self._chooser is not None:
            room = self.room(save)
            pages = slab.view[room : room + group.raw_bytes]
            codec = self._chooser.choose(claim.key.group, group.layers, pages)
        provenance = Provenance(
            token_digest=save.token_digest,
            writer=self._writer,
            created_s=int(time()),
            tokens=save.tokens,
        )
        return encode_in_place(
            claim,
            group.layers,
            slab.view,
            codec=codec,
            provenance=provenance,
            seal=self._seal,
        )

    def saved(self, seconds: float) -> None:
        """A payload was encoded and stored within ``seconds``."""
        if self._chooser is not None:
            self._chooser.saved(seconds)
