"""What operators see of sealed payloads, with the keys and without."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from objkv.cache.chunks import shard_record
from objkv.codec.payload import Claim, encode, read_header
from objkv.codec.seal import Seal, SealKey
from objkv.index.base import ChunkEntry
from objkv.keys.chunk import ChunkKey
from objkv.keys.identity import Identity, sealed_extra
from objkv.keys.prefix import root_hash
from tests.cli.conftest import Machine, Ran, Run
from tests.codec.payloads import LAYERS, PROVENANCE, pages_of
from tests.support.samples import CHUNK, IDENTITY, save_identity

OURS, ACMES = (Random(seed).randbytes(32) for seed in (1, 2))
WAYS = ("signed", "encrypted")
DOCUMENT = f"ours * {OURS.hex()}\nacmes acme {ACMES.hex()}\n"
PLAIN = IDENTITY
SEALED = replace(IDENTITY, extra=sealed_extra((), WAYS))
ACME = replace(SEALED, tenant="acme")


def put(machine: Machine, identity: Identity, seal: Seal | None) -> ChunkKey:
    """One payload and its record, in a namespace of its own; its key."""
    save_identity(machine.bulk, identity)
    namespace = identity.namespace()
    key = ChunkKey(namespace, b"\x07" * 20, 0)
    claim = Claim(key, root_hash(namespace), 0, CHUNK)
    payload = encode(
        claim, LAYERS, pages_of(LAYERS), codec="blosc", provenance=PROVENANCE, seal=seal
    )
    machine.bulk.put(key.path(), payload)
    chunk = ChunkEntry(namespace, key.prefix_hash, claim.parent_hash, 0, CHUNK)
    machine.index.publish(chunk, {key.field: shard_record(read_header(payload))}, ttl_s=3600)
    return key


def sealed_by(secret: bytes, key_id: str) -> Seal:
    key = SealKey(key_id, "*", secret)
    return Seal([key], [key])


FORGED = sealed_by(b"else" * 8, "ours")
"""Nobody who reads has this key."""


@pytest.fixture
def keys(machine: Machine) -> dict[str, ChunkKey]:
    return {
        "plain": put(machine, PLAIN, None),
        "sealed": put(machine, SEALED, sealed_by(OURS, "ours")),
        "acme": put(machine, ACME, sealed_by(ACMES, "acmes")),
    }


@pytest.fixture
def with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(DOCUMENT)
    file.chmod(0o600)
    monkeypatch.setenv("OBJKV_SIGNING_KEYS_FILE", str(file))
    monkeypatch.setenv("OBJKV_ENCRYPTION_KEYS_FILE", str(file))


@pytest.mark.usefixtures("with_keys")
def test_each_namespace_is_verified_as_it_is_sealed(
    run: Run, machine: Machine, keys: dict[str, ChunkKey]
) -> None:
    ran = run("verify", "--all", "--json")
    assert (ran.code, ran.document["ok"]) == (0, 2)
    assert f"{PLAIN.namespace()} is skipped" in ran.err, "a forged payload would be ok there"
    put(machine, SEALED, FORGED)
    ran = run("verify", "--all", "--json")
    assert ran.document["ok"] == 1
    (finding,) = ran.document["findings"]
    assert (finding["kind"], finding["key"]) == ("corrupt", keys["sealed"].path())
    assert "signature" in str(finding)
    machine.index.drop(SEALED.namespace(), keys["sealed"].prefix_hash)
    rebuilt = run("rebuild", "--apply", "--json").document
    assert (rebuilt["restored"], rebuilt["corrupt"]) == (0, 1)


def test_without_keys_what_is_sealed_is_left_alone(
    run: Run, machine: Machine, keys: dict[str, ChunkKey]
) -> None:
    ran = run("verify", "--all", "--quarantine", "--apply", "--json")
    assert (ran.code, ran.document["ok"], ran.document["findings"]) == (0, 1, [])
    assert "keys are not configured" in ran.err
    assert "keys are not configured" in run("rebuild").err
    assert all(machine.bulk.get(key.path()) for key in keys.values())


@pytest.mark.usefixtures("with_keys")
def test_a_payload_is_shown_with_who_sealed_it(
    run: Run, machine: Machine, keys: dict[str, ChunkKey]
) -> None:
    for name, key_id in (("sealed", "ours"), ("acme", "acmes")):
        ran = run("show", keys[name].path())
        assert ran.code == 0
        assert f"{key_id}, verified" in ran.out
        assert OURS.hex() not in ran.out + ran.err
    shown = run("show", keys["plain"].path(), "--json").document["payloads"][0]
    assert (shown["signed_by"], shown["seal_verified"]) == (None, None)
    put(machine, SEALED, FORGED)
    assert run("show", keys["sealed"].path()).code == 1


def test_without_keys_a_payload_is_shown_and_its_damage_found(
    run: Run, machine: Machine, keys: dict[str, ChunkKey]
) -> None:
    ran = run("show", keys["sealed"].path())
    assert ran.code == 0
    assert "ours, not verified" in ran.out
    payload = bytearray(machine.bulk.get(keys["sealed"].path()) or b"")
    payload[-1] ^= 1
    machine.bulk.put(keys["sealed"].path(), payload)
    assert run("show", keys["sealed"].path()).code == 1


@pytest.mark.usefixtures("with_keys")
def test_doctor_reads_the_keys_and_tells_their_ids(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seal(ran: Ran) -> list[tuple[str, str]]:
        found = [check for check in ran.document["checks"] if check["area"] == "seal"]
        return [(check["status"], check["detail"]) for check in found]

    ran = run("doctor", "--json")
    assert seal(ran) == [("ok", "signing ['ours'], encryption ['ours']")]
    assert OURS.hex() not in ran.out
    monkeypatch.setenv("OBJKV_SIGNING_KEYS_FILE", "/nowhere")
    ran = run("doctor", "--json")
    assert (seal(ran)[0][0], ran.code) == ("denied", 2)
