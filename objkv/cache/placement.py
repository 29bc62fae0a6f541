"""Which payloads are kept hot as well: small ones, because Redis pays for every megabyte twice,
in memory and in its one thread."""


def belongs_in_hot(payload_bytes: int, payload_bytes_max: int) -> bool:
    """Whether a payload of this size is copied to the hot store; a limit of 0 keeps none."""
    return payload_bytes <= payload_bytes_max
