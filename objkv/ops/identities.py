"""What namespaces stand for: the identity documents that the bulk store keeps."""

import json
import re
from collections.abc import Sequence
from typing import Final, get_args

from objkv.errors import ConfigError, PayloadError
from objkv.keys.encoder import ENCODER_SCHEME
from objkv.keys.identity import (
    FORMAT,
    HASH_SCHEME,
    NAMESPACE_HEX,
    GroupIdentity,
    GroupKind,
    Identity,
    identity_path,
)
from objkv.stores.base import ReadStore

DOCUMENT_BYTES_MAX: Final = 4 << 20
_BEGINNING = re.compile(rf"[0-9a-f]{{1,{NAMESPACE_HEX}}}")


def read_identity(bulk: ReadStore, namespace: str) -> Identity | None:
    """What ``namespace`` stands for, or None if the bulk store has no document of it.

    Raises ``PayloadError`` if the document is not the one whose digest names the namespace.
    """
    document = identity_document(bulk, namespace)
    return None if document is None else parse_identity(document, namespace)


def identity_document(bulk: ReadStore, namespace: str) -> bytes | None:
    """What lies where the namespace's document should be, None if nothing does.

    Raises ``PayloadError`` for more than any document is.
    """
    path = identity_path(namespace)
    document = bulk.get_range(path, 0, DOCUMENT_BYTES_MAX + 1)
    if document is not None and len(document) > DOCUMENT_BYTES_MAX:
        raise PayloadError(f"{path}: longer than any identity document")
    return document


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
        if not _is_well_typed(identity):
            raise TypeError
        digest = identity.namespace()
    # The document is somebody else's: whatever the values' own checks say of it is its fault.
    except (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as exc:
        raise PayloadError(f"{identity_path(namespace)}: not an identity document") from exc
    if digest != namespace:
        raise PayloadError(f"{identity_path(namespace)}: is the document of {digest}")
    return identity


def _is_well_typed(identity: Identity) -> bool:
    groups = identity.groups
    texts: list[object] = [identity.model, identity.weights, identity.kv_dtype, identity.tenant]
    texts += [identity.page_layout, *(layer for group in groups for layer in group.layers)]
    numbers: list[object] = [identity.chunk_tokens, identity.weights_epoch]
    for group in groups:
        numbers += [group.heads, group.content, group.block_size]
        numbers += [] if group.window is None else [group.window]
        texts += [group.kind] + ([] if group.state is None else [group.state])
    texts += [] if identity.quantization is None else [identity.quantization]
    are_known = all(group.kind in get_args(GroupKind) for group in groups)
    # ``type`` and not ``isinstance``: True is an int to Python.
    return {*map(type, texts)} <= {str} and {*map(type, numbers)} <= {int} and are_known


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
    if beginning is None:
        told = ", ".join(sorted(known))
        raise ConfigError(f"{len(known)} namespaces; choose one with --namespace: {told}")
    what = f"{len(found)} namespaces begin" if found else "no namespace begins"
    what += f" with {beginning}"
    raise ConfigError(f"{what}; choose one of: {', '.join(sorted(found or known))}")
