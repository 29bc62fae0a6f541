"""What another writer left where a payload was to go: usable, or to be written over."""

from objkv.codec.payload import Claim, Header, header_bytes_needed, read_header
from objkv.codec.seal import Seal
from objkv.errors import PayloadError
from objkv.stores.base import ReadStore

_LENGTH_BYTES = 8


def existing_header(bulk: ReadStore, claim: Claim, seal: Seal | None) -> Header | None:
    """The header of the payload that is stored for ``claim``, or None if it is not usable: cut
    short, of another claim, or not sealed as ``seal`` wants it. Its frames are not looked at."""
    path = claim.key.path()
    try:
        start = bulk.get_range(path, 0, _LENGTH_BYTES)
        if start is None:
            return None
        prefix = bulk.get_range(path, 0, header_bytes_needed(start))
        entry = bulk.head(path)
        if prefix is None or entry is None:
            return None
        header = read_header(prefix, seal=seal)
    except PayloadError:
        return None
    if header.claim != claim or header.nbytes != entry.nbytes:
        return None
    return header
