"""What namespaces stand for: the identity documents that the bulk store keeps."""

import json
import re
from collections.abc import Sequence

from objkv.errors import ConfigError, PayloadError
from objkv.keys.encoder import ENCODER_SCHEME
from objkv.keys.identity import (
    FORMAT,
    HASH_SCHEME,
    NAMESPACE_HEX,
    GroupIdentity,
    Identity,
    identity_path,
)
from objkv.stores.base import ReadStore

_BEGINNING = re.compile(rf"[0-9a-f]{{1,{NAMESPACE_HEX}}}")


def read_identity(bulk: ReadStore, namespace: str) -> Identity | None:
    """What ``namespace`` stands for, or None if the bulk store has no document of it.

    Raises ``PayloadError`` if the document is not the one whose digest names the namespace.
    """
    document = bulk.get(identity_path(namespace))
    return None if document is None else parse_identity(document, namespace)


def parse_identity(document: bytes, namespace: str) -> Identity:
    """The identity that ``document`` spells, whose digest must be ``namespace``.

    Raises ``PayloadError`` for anything else, also for formats newer than this version.
    """
    try:
        values = json.loads(document)
        written = (values.pop("format"), values.pop("hash"))
        if written == (FORMAT, ENCODER_SCHEME):
            raise PayloadError(f"{identity_path(namespace)}: of encoder outputs, not of KV")
        if written != (FORMAT, HASH_SCHEME):
            raise PayloadError(f"{identity_path(namespace)}: written as {written}: not known here")
        groups = tuple(
            GroupIdentity(**{**group, "layers": tuple(group["layers"])})
            for group in values.pop("groups")
        )
        extra = tuple((str(name), str(value)) for name, value in values.pop("extra"))
        identity = Identity(**values, groups=groups, extra=extra)
        digest = identity.namespace()
    # The document is somebody else's: whatever the values' own checks say of it is its fault.
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as exc:
        raise PayloadError(f"{identity_path(namespace)}: not an identity document") from exc
    if digest != namespace:
        raise PayloadError(f"{identity_path(namespace)}: is the document of {digest}")
    return identity


def pick_namespace(known: Sequence[str], beginning: str | None) -> str:
    """The one namespace that begins so; the only one there is for None.

    A complete name is taken as it is, because an index may have forgotten it. Raises
    ``ConfigError`` that lists the choices.
    """
    if beginning is not None and _BEGINNING.fullmatch(beginning) is None:
        raise ConfigError(f"{beginning!r} is no namespace: write 32 hex digits, or the first few")
    if beginning is not None and len(beginning) == NAMESPACE_HEX:
        return beginning
    found = [name for name in known if name.startswith(beginning or "")]
    if len(found) == 1:
        return found[0]
    if not known:
        raise ConfigError(
            "the index has no namespaces: no replica has saved yet, or index_url is not theirs"
        )
    what = f"{len(found)} namespaces" + (f" begin with {beginning}" if beginning else "")
    raise ConfigError(f"{what}; choose one of: {', '.join(sorted(found or known))}")
