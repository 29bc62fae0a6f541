"""Whether a LoRA adapter's name may have come to stand for other weights than it did.

vLLM's keys hold an adapter's name and path, not what its files hold, and a tier is not told which
adapter a request uses. So a name that comes back is taken for other weights. Adapters that requests
bring along, and files that change beneath them, are not heard of: hence the operator's word, see
``docs/tier.md``. Source: vLLM 0.32, ``_gen_lora_extra_hash_keys`` in ``v1/core/kv_cache_utils.py``.
"""

from collections.abc import Callable
from typing import Any


class TierAdapters:
    """As ``EngineHooks`` wants it. The scheduler's thread only."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self._changed = changed
        self._numbers: dict[str, int | None] = {}
        """Of each name that was heard; None when it was put away. Never forgotten: names of
        adapters are few."""
        self._unheard = False
        """Whether one was put away whose name was not heard."""

    def loaded(self, lora_request: Any) -> None:
        """vLLM is about to read an adapter's files."""
        name, number = lora_request.lora_name, lora_request.lora_int_id
        is_new = name not in self._numbers and not self._unheard
        is_same = self._numbers.get(name) == number  # which vLLM does not read again
        self._numbers[name] = number
        if getattr(lora_request, "load_inplace", False) or not (is_new or is_same):
            self._changed()

    def unloaded(self, number: int) -> None:
        """vLLM has put the adapter of that ``lora_int_id`` away."""
        names = [name for name, of in self._numbers.items() if of == number]
        self._unheard = self._unheard or not names
        for name in names:
            self._numbers[name] = None
