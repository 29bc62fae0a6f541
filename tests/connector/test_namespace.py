"""The namespace a replica lives in, and what a reset makes of it."""

import logging

import pytest

from objkv.connector.namespace import ReplicaNamespace
from objkv.errors import StoreUnavailable
from objkv.keys.identity import identity_path
from objkv.ops.diff import namespace_of, parse_document
from tests.contracts.flaky import FlakyStore
from tests.contracts.memory_store import MemoryStore
from tests.support.sides import IDENTITY, Jobs


def test_the_document_is_stored_once_and_only_one_try_is_on_its_way() -> None:
    store, jobs = FlakyStore(MemoryStore()), Jobs()
    namespace = ReplicaNamespace(IDENTITY, store, jobs.submit, writes=True)
    jobs.full = True
    namespace.announce()
    jobs.full = False
    store.fail_next(StoreUnavailable("gone"))
    for _ in range(3):
        namespace.announce()
    assert len(jobs) == 1
    with pytest.raises(StoreUnavailable):
        jobs.run()
    namespace.announce()
    jobs.run()
    assert store.get(identity_path(namespace.name)) == IDENTITY.canonical()
    namespace.announce()
    assert not jobs


def test_after_a_reset_two_replicas_do_not_share_by_counting_alike() -> None:
    """One that left blocks in use closes the namespace until one that did not."""
    one, other = (
        ReplicaNamespace(IDENTITY, MemoryStore(), Jobs().submit, writes=True) for _ in range(2)
    )
    assert not one.renew(clean=False)
    assert not one.open
    assert one.name == other.name == IDENTITY.namespace()
    assert one.renew(clean=True)
    assert other.renew(clean=True)
    assert one.open
    assert len({IDENTITY.namespace(), one.name, other.name}) == 3


@pytest.mark.parametrize("writes", [False, True])
def test_every_replica_logs_its_document_once_for_each_namespace(
    caplog: pytest.LogCaptureFixture, *, writes: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="objkv.connector.namespace"):
        namespace = ReplicaNamespace(IDENTITY, MemoryStore(), Jobs().submit, writes=writes)
        for _ in range(3):
            namespace.announce()
        assert caplog.text.count("document=") == 1
        namespace.renew(clean=True)
        namespace.announce()
    assert caplog.text.count("document=") == 2
    assert namespace_of(parse_document(caplog.text, "log")) == namespace.name
