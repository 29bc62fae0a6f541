"""The layouts of payloads in the arena, each with a number that says what readers would check.

Nearly all payloads of a model have one of a few layouts. A reader that knows the number of one
needs no header of it any more: ``docs/agent.md`` says what a number promises.
"""

from threading import Lock
from typing import Final, NamedTuple

from objkv.codec.payload import LayerSpec

LAYOUTS_MAX: Final = 1024
"""Layouts with a number. Later ones have none until the agent ends."""
_SHARDS_MAX = 1024
"""Shards whose layout is remembered, so that headers are parsed quickly."""


class Layout(NamedTuple):
    """What payloads have in common. The layers' pages follow the header, uncompressed and without
    a gap, so this is where each frame is, and how long the payload is."""

    layers: tuple[LayerSpec, ...] = ()
    header_bytes: int = 0
    """Length of the header; 0 if it is not known."""
    number: int = 0
    """Never another layout's as long as the agent runs. 0: it has none."""


UNKNOWN: Final = Layout()


class Layouts:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._numbers: dict[tuple[int, tuple[LayerSpec, ...]], Layout] = {}
        self._layers: dict[tuple[LayerSpec, ...], tuple[LayerSpec, ...]] = {}
        """One object for equal layers, since the header's parser goes by its identity."""
        self._last: dict[tuple[str, str], Layout] = {}

    def last(self, namespace: str, field: str) -> Layout:
        """Return the layout of the last payload of a shard: most probably the next one's, too."""
        return self._last.get((namespace, field), UNKNOWN)

    def note(
        self, namespace: str, field: str, layers: tuple[LayerSpec, ...], header_bytes: int
    ) -> int:
        """Return the number of the layout of a payload whose header was verified, which the arena
        has uncompressed."""
        last = self._last.get((namespace, field))
        if last is not None and last.layers is layers and last.header_bytes == header_bytes:
            return last.number
        with self._lock:
            layout = self._numbers.get((header_bytes, layers))
            if layout is None:
                layout = self._new(layers, header_bytes)
            self._last.pop((namespace, field), None)
            while len(self._last) >= _SHARDS_MAX:
                del self._last[next(iter(self._last))]
            self._last[namespace, field] = layout
        return layout.number

    def _new(self, layers: tuple[LayerSpec, ...], header_bytes: int) -> Layout:
        if len(self._numbers) >= LAYOUTS_MAX:
            return Layout(layers, header_bytes)
        layers = self._layers.setdefault(layers, layers)
        layout = Layout(layers, header_bytes, len(self._numbers) + 1)
        self._numbers[header_bytes, layers] = layout
        return layout
