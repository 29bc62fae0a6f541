"""What breakers tell, for whichever connector's statistics: per end and direction whether one is
open, how often one opened, and how many calls were refused meanwhile."""

from objkv.breaker import DIRECTIONS

_EACH = [(end, direction) for end in ("bulk", "hot", "index") for direction in DIRECTIONS]

BREAKER_GAUGES = {
    f"breaker_open_{end}_{direction}": f"1 while {direction}s of the {end} end are left alone."
    for end, direction in _EACH
}
BREAKER_COUNTERS = {
    f"breaker_{what}_{end}_{direction}": text.format(f"{direction}s of the {end} end")
    for end, direction in _EACH
    for what, text in (
        ("openings", "How often {} were given up."),
        ("refused", "Calls not made because {} were left alone."),
    )
}
