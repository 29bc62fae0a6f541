"""The text of stored prefixes, if replicas stored token ids in payloads (``store_tokens``).

The text is a user's prompt, so by default only its length is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from objkv.cache.chunks import stored_header
from objkv.errors import ConfigError, PayloadError
from objkv.keys.chunk import ChunkKey, payload_path
from objkv.keys.prefix import token_digest
from objkv.ops.backends_view import StoredNamespace
from objkv.ops.inventory.file import Inventory
from objkv.ops.inventory.tree import RootAudit, Tree, TreeNode
from objkv.ops.inventory.walk import ReadView
from objkv.stores.base import Entry

TEXT_MAX = 160
"""Characters shown per text."""
_TOKENS_MAX = 64
"""Tokens of a chunk to decode for them."""
_AT_ONCE = 64
_PAYLOAD = """
SELECT field, nbytes, modified_s FROM payloads WHERE ns = ? AND hash = ? AND nbytes > 0
ORDER BY field LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class TextReader:
    """Reads the first words of a chunk's text."""

    view: ReadView
    namespaces: Mapping[str, StoredNamespace]
    tokenizer: Tokenizer
    show: bool
    """False to report only the length."""

    def text(self, namespace: str, entry: Entry) -> str | None:
        """Return the text of the payload ``entry``.

        None if no token ids are stored, or if they do not match the payload's token digest. Raises
        ``StoreError``.
        """
        known = self.namespaces.get(namespace)
        if known is None:
            return None
        try:
            header = stored_header(self.view.bulk, entry, self.view.seal_of(known))
        except (ConfigError, PayloadError):  # missing seal keys; a bad header, which verify reports
            return None
        if header is None or header.claim.key != ChunkKey.parse(entry.key):
            return None
        provenance = header.provenance
        tokens = provenance.tokens
        if tokens is None or token_digest(tokens) != provenance.token_digest:
            return None
        if not self.show:
            return f"redacted: {len(self._decoded(tokens)):,} characters"
        text = self._decoded(tokens[:_TOKENS_MAX])
        return text[:TEXT_MAX] + "…" if len(text) > TEXT_MAX or len(tokens) > _TOKENS_MAX else text

    def _decoded(self, tokens: Sequence[int]) -> str:
        try:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))
        except Exception:  # the library raises bare Exception, such as for unknown ids
            return ""


def with_texts(
    inventory: Inventory,
    tree: Tree,
    roots: Sequence[RootAudit],
    reader: TextReader,
    *,
    workers: int,
) -> tuple[tuple[TreeNode, ...], tuple[RootAudit, ...]]:
    """Return the nodes and ``roots`` with the text of their first chunks, one header read each."""
    heads = {*tree.heads.values(), *((one.namespace, bytes.fromhex(one.first)) for one in roots)}
    texts: dict[tuple[str, bytes], str | None] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="objkv-texts") as pool:
        for some in _batches(sorted(heads)):
            entries = [_entry(inventory, head) for head in some]
            read = pool.map(
                lambda head, entry: None if entry is None else reader.text(head[0], entry),
                some,
                entries,
            )
            texts |= dict(zip(some, read, strict=True))
    nodes = tuple(
        replace(node, text=texts[tree.heads[node.id]]) if node.id in tree.heads else node
        for node in tree.nodes
    )
    labelled = (
        replace(one, label=texts[one.namespace, bytes.fromhex(one.first)] or one.label)
        for one in roots
    )
    return nodes, tuple(labelled)


def _batches(heads: list[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    for start in range(0, len(heads), _AT_ONCE):
        yield heads[start : start + _AT_ONCE]


def _entry(inventory: Inventory, head: tuple[str, bytes]) -> Entry | None:
    namespace, prefix_hash = head
    rows = inventory.some(_PAYLOAD, (inventory.namespace(namespace), prefix_hash))
    for text, nbytes, modified_s in rows:
        return Entry(payload_path(namespace, prefix_hash, text), nbytes, modified_s)
    return None
