"""The text of stored prefixes, where replicas kept their tokens in payloads (``store_tokens``).

It is somebody's prompt: unless asked otherwise, only how long it is gets out of here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from objkv.errors import ConfigError, PayloadError
from objkv.keys.chunk import ChunkKey
from objkv.keys.prefix import token_digest
from objkv.ops.audit.findings import payload_path
from objkv.ops.audit.report import RootAudit, TreeNode
from objkv.ops.audit.spool import AuditSpool
from objkv.ops.audit.tree import Tree
from objkv.ops.audit.walk import AuditView
from objkv.ops.backends_view import StoredNamespace, stored_header
from objkv.stores.base import Entry

TEXT_MAX = 160
"""Characters of a text that is shown."""
_TOKENS_MAX = 64
"""Of a chunk, from which that many characters are made."""
_AT_ONCE = 64
_PAYLOAD = """
SELECT field, nbytes, modified_s FROM payloads WHERE ns = ? AND hash = ? ORDER BY field LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class TextReader:
    """Reads the beginning of a chunk's text."""

    view: AuditView
    namespaces: Mapping[str, StoredNamespace]
    tokenizer: Tokenizer
    show: bool
    """False: tell only that there is one, and how long it is."""

    def text(self, namespace: str, entry: Entry) -> str | None:
        """Of the chunk that ``entry`` is a payload of; None where no tokens are stored, or not the
        ones that it was made of. Raises ``StoreError``."""
        known = self.namespaces.get(namespace)
        if known is None:
            return None
        try:
            header = stored_header(self.view.bulk, entry, self.view.seal_of(known))
        except (ConfigError, PayloadError):  # keys that are not here; what verify finds
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
        except Exception:  # the library raises bare Exception, as for ids beyond its own
            return ""


def with_texts(
    spool: AuditSpool,
    tree: Tree,
    roots: Sequence[RootAudit],
    reader: TextReader,
    *,
    workers: int,
    check: Callable[[], None] = lambda: None,
) -> tuple[tuple[TreeNode, ...], tuple[RootAudit, ...]]:
    """``tree`` and ``roots`` with the text of each one's first chunk: a header is read for each."""
    heads = {*tree.heads.values(), *((one.namespace, bytes.fromhex(one.hash)) for one in roots)}
    texts: dict[tuple[str, bytes], str | None] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="objkv-texts") as pool:
        for some in _batches(sorted(heads)):
            check()
            entries = [_entry(spool, head) for head in some]
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
        replace(one, label=texts[one.namespace, bytes.fromhex(one.hash)] or one.label)
        for one in roots
    )
    return nodes, tuple(labelled)


def _batches(heads: list[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    for start in range(0, len(heads), _AT_ONCE):
        yield heads[start : start + _AT_ONCE]


def _entry(spool: AuditSpool, head: tuple[str, bytes]) -> Entry | None:
    namespace, prefix_hash = head
    rows = spool.some(_PAYLOAD, (spool.namespace(namespace), prefix_hash))
    for text, nbytes, modified_s in rows:
        return Entry(payload_path(namespace, prefix_hash, text), nbytes, modified_s)
    return None
