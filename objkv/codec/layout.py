"""Where in a header the few things are that are found before its JSON is read."""

from typing import Final

from objkv.codec.values import METADATA_NAME

LENGTH_BYTES: Final = 8
OPENING: Final = f'{{"{METADATA_NAME}":{{"checksum":"'.encode()
CHECKSUM_AT: Final = LENGTH_BYTES + len(OPENING)
CHECKSUM_END: Final = CHECKSUM_AT + 32
SIGNATURE_OPENING: Final = b'","signature":"'
SIGNATURE_AT: Final = CHECKSUM_END + len(SIGNATURE_OPENING)
"""Of a signed payload."""
SIGNATURE_END: Final = SIGNATURE_AT + 64
