"""The scales of a quantised layer as text: ``<k> <v>``, each number in its shortest form.

Pages of such a layer mean nothing without them: each value is what the page holds times its scale.
Text, so that two of them are equal exactly when their numbers are, and no float is ever compared.
"""

import re
from math import isfinite

_NUMBER = r"[0-9]{1,20}\.[0-9]{1,20}(?:e[+-][0-9]{1,3})?|[0-9]{1,20}e[+-][0-9]{1,3}"
_SCALES = re.compile(rf"({_NUMBER}) ({_NUMBER})")


def scales_text(k_scale: float, v_scale: float) -> str:
    """The scales of K and V; raises ValueError unless both are finite and positive."""
    for scale in (k_scale, v_scale):
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"{scale!r} is no scale")
    return f"{float(k_scale)!r} {float(v_scale)!r}"


def is_scales(text: str) -> bool:
    """Whether ``scales_text`` could have written ``text``."""
    match = _SCALES.fullmatch(text)
    if match is None:
        return False
    numbers = tuple(map(float, match.groups()))
    return all(isfinite(n) and n > 0 for n in numbers) and scales_text(*numbers) == text
