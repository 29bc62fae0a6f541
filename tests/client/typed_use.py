"""How a typed program uses the client; ``make types`` checks it."""

import objkv
from objkv import Client, Match, StoreError


def best(client: Client, tokens: list[int]) -> int:
    try:
        found: Match = client.match(tokens, namespace="acme/tiny")
    except StoreError:
        return 0
    names: list[str] = [one.name for one in client.namespaces() if one.problem is None]
    sizes: dict[str, int] = {chunk.prefix_hash: chunk.nbytes for chunk in client.chunks()}
    report: objkv.AuditReport = client.audit()
    pin: objkv.PinnedPrefix = client.pin(tokens, for_s=60)
    client.unpin(pin)
    client.match(tokens, namespaces="x")  # type: ignore[call-arg] # refused, as intended
    objkv.nothing  # type: ignore[attr-defined] # noqa: B018 - refused, as intended
    return found.tokens + len(names) + len(sizes) + report.totals.chunks
