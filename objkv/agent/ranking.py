"""The order in which resident payloads are evicted."""

from collections import OrderedDict
from collections.abc import Callable


class Ranking:
    """Least recently used first. Thread safety is the caller's."""

    def __init__(self, nbytes_max: int) -> None:
        self._keys: OrderedDict[str, int] = OrderedDict()

    def add(self, key: str, nbytes: int) -> None:
        """Record that a payload became resident."""
        self._keys[key] = nbytes

    def use(self, key: str) -> None:
        """Record that a payload was read."""
        self._keys.move_to_end(key)

    def remove(self, key: str) -> None:
        """Forget a payload."""
        self._keys.pop(key, None)

    def victim(self, is_free: Callable[[str], bool]) -> str | None:
        """Return the next payload to evict among those that are free."""
        return next((key for key in self._keys if is_free(key)), None)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys
