"""Who wrote the stored payloads and how they are protected, from a sample of their headers; and
the pins, with their authors and ends.

A sample, because a header costs a request: ``objkv verify --all`` reads every payload. Prefix
hashes are uniform, so payloads at even distances in their order are a random choice.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from objkv.cache.pins import Pin, scan_pins
from objkv.codec.payload import Header
from objkv.errors import PayloadError, StoreError
from objkv.ops.audit.answers import PinAudit, ProvenanceAudit, WriterAudit
from objkv.ops.audit.figures import namespace_names
from objkv.ops.audit.findings import HEADER_BYTES_MIN, payload_path
from objkv.ops.audit.spool import AuditSpool
from objkv.ops.backends_view import StoredNamespace, stored_header
from objkv.stores.base import Entry, ReadStore

HEADERS_MAX = 1_000
"""Headers read in one audit: with 16 workers, a few seconds at a bucket."""
HEADERS_OF_ONE_MAX = 32
_HEADERS_OF_ONE_MIN = 2
_WRITERS_MAX = 20
PINS_MAX = 1_000
_CHOSEN = """
SELECT hash, field, nbytes, modified_s FROM (
  SELECT *, row_number() OVER (ORDER BY hash, field) - 1 AS place FROM main.payloads
  WHERE ns = ? AND nbytes >= ?)
WHERE place % ? = 0 LIMIT ?
"""
_COUNT = "SELECT count(*) FROM main.payloads WHERE ns = ? AND nbytes >= ?"


def read_provenance(
    spool: AuditSpool,
    bulk: ReadStore,
    namespaces: Sequence[StoredNamespace],
    *,
    workers: int,
) -> tuple[tuple[ProvenanceAudit, ...], str | None]:
    """Return the provenance of these namespaces, and a sentence if headers could not be read."""
    numbers = {name: ns for ns, name in namespace_names(spool).items()}
    stored = [one for one in namespaces if one.name in numbers]
    of_one = HEADERS_MAX // max(1, len(stored))
    of_one = min(HEADERS_OF_ONE_MAX, max(_HEADERS_OF_ONE_MIN, of_one))
    stored = stored[: HEADERS_MAX // _HEADERS_OF_ONE_MIN]
    audits: list[ProvenanceAudit] = []
    with ThreadPoolExecutor(workers, thread_name_prefix="objkv-headers") as pool:
        try:
            for one in stored:
                entries = list(_chosen(spool, one.name, numbers[one.name], of_one))
                headers = pool.map(lambda entry: _header(bulk, entry), entries)
                if found := [header for header in headers if header is not None]:
                    audits.append(_provenance(one, found))
        except StoreError as exc:
            pool.shutdown(cancel_futures=True)
            return tuple(audits), f"headers of payloads were not read: {exc}"
    return tuple(audits), None


def _chosen(spool: AuditSpool, name: str, ns: int, most: int) -> Iterator[Entry]:
    """Yield ``most`` payloads at even distances in the order of their hashes, or all if there are
    not more."""
    [(count,)] = spool.some(_COUNT, (ns, HEADER_BYTES_MIN))
    step = max(1, count // most)
    for prefix_hash, text, nbytes, modified_s in spool.some(
        _CHOSEN, (ns, HEADER_BYTES_MIN, step, most)
    ):
        yield Entry(payload_path(name, prefix_hash, text), nbytes, modified_s)


def _header(bulk: ReadStore, entry: Entry) -> Header | None:
    """Return the header, without a check of its seal; None if it is gone or damaged."""
    try:
        return stored_header(bulk, entry, None)
    except PayloadError:  # verify reports it
        return None


def _provenance(namespace: StoredNamespace, headers: Sequence[Header]) -> ProvenanceAudit:
    kinds = Counter(_protection(header) for header in headers)
    times: dict[str, list[int]] = {}
    for header in headers:
        host = header.provenance.writer.partition(":")[0] or "(unnamed)"
        times.setdefault(host, []).append(header.provenance.created_s)
    writers = sorted(
        (WriterAudit(host, len(at), min(at), max(at)) for host, at in times.items()),
        key=lambda one: (-one.payloads, one.host),
    )
    return ProvenanceAudit(
        namespace=namespace.name,
        seals=namespace.seals,
        headers=len(headers),
        encrypted=kinds["encrypted"],
        signed=kinds["signed"],
        unsealed=kinds["unsealed"],
        token_ids=sum(header.provenance.tokens is not None for header in headers),
        writers=tuple(writers[:_WRITERS_MAX]),
        writers_omitted=max(0, len(writers) - _WRITERS_MAX),
    )


def _protection(header: Header) -> str:
    if header.marks.encrypted_by:
        return "encrypted"
    return "signed" if header.marks.signed_by else "unsealed"


def read_active_pins(
    bulk: ReadStore, namespaces: Mapping[str, object], *, now_s: float
) -> tuple[tuple[PinAudit, ...], tuple[str, ...]]:
    """Return the active pins of these namespaces, the next to end first, and sentences about the
    documents that are unreadable or were not read. Raises ``StoreError``."""
    pins, problems = list[PinAudit](), list[str]()
    for name in namespaces:
        for pin in scan_pins(bulk, name):
            if isinstance(pin, PayloadError):
                problems.append(str(pin))
            elif pin.until_s > now_s:
                pins.append(_pinned(pin))
    pins.sort(key=lambda pin: (pin.until_s, pin.namespace, pin.leaf))
    if len(pins) > PINS_MAX:
        problems.append(f"{len(pins) - PINS_MAX:,} more pins are not listed")
    return tuple(pins[:PINS_MAX]), tuple(problems)


def _pinned(pin: Pin) -> PinAudit:
    return PinAudit(
        namespace=pin.namespace,
        leaf=pin.leaf.hex(),
        tokens=pin.tokens,
        chunks=len(pin.chunks),
        by=pin.by,
        created_s=pin.created_s,
        until_s=pin.until_s,
    )
