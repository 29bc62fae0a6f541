"""The sources of keys, and the refusals before anything is served."""

import builtins
import os
import shlex
import stat
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from objkv.assembly.seal import open_seal, open_seals
from objkv.codec import seal
from objkv.config import Config, load_config
from objkv.errors import ConfigError
from objkv.keys.identity import sealed_extra
from objkv.ops.backends_view import StoredNamespace

SECRET = Random(3).randbytes(32).hex()
LINE = f"key-1 * {SECRET}\n"


def key_file(folder: Path, text: str = LINE, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def printing(text: str) -> str:
    return shlex.join([sys.executable, "-c", f"print({text!r})"])


def config(**settings: Any) -> Config:
    return Config(bulk_url="file:///dev/null/kv", index_url="sqlite:///dev/null/i", **settings)


def refusal(**settings: Any) -> str:
    """Return the message for the operator; it never contains a key."""
    with pytest.raises(ConfigError) as caught:
        open_seal(config(**settings))
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET[:16] not in f"{error!r} {vars(error)}"
        error = error.__cause__
    return str(caught.value)


def test_keys_come_from_a_file_or_from_what_a_command_prints(tmp_path: Path) -> None:
    by_file = open_seal(config(signing_keys_file=key_file(tmp_path)))
    by_command = open_seal(config(signing_keys_command=printing(LINE)))
    both = open_seal(
        config(
            signing_keys_file=key_file(tmp_path),
            encryption_keys_command=printing(f"enc-1 default {SECRET}"),
        )
    )
    assert by_file.key_ids == by_command.key_ids == "signing ['key-1']"
    assert both.key_ids == "signing ['key-1'], encryption ['enc-1']"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o602])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    told = refusal(signing_keys_file=key_file(tmp_path, mode=mode))
    assert f"mode {mode:04o}" in told
    assert "chmod 600" in told


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert "No such file" in refusal(encryption_keys_file=tmp_path / "none")
    assert "Is a directory" in refusal(encryption_keys_file=tmp_path)
    os.mkfifo(tmp_path / "pipe", stat.S_IRUSR | stat.S_IWUSR)
    assert "not a regular file" in refusal(encryption_keys_file=tmp_path / "pipe")
    no_text = [sys.executable, "-c", 'import sys; sys.stdout.buffer.write(b"\\xff\\xfe")']
    assert "not UTF-8 text" in refusal(signing_keys_command=shlex.join(no_text))
    long = key_file(tmp_path, "#" * (1 << 20) + "\n" + LINE)
    assert "exceeds 1048576 bytes" in refusal(signing_keys_file=long)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = key_file(tmp_path)
    os.chown(file, 12345, -1) if os.geteuid() == 0 else None
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert "belongs to another user" in refusal(signing_keys_file=file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no key in it"),
        (f"key-1 acme {SECRET}", "there is no key for tenant 'default' or '\\*'"),
        (f"key-1 * {SECRET[:-1]}", "line 1: the key must be 32 bytes"),
    ],
)
def test_a_document_without_a_usable_key_is_refused(tmp_path: Path, text: str, told: str) -> None:
    file = key_file(tmp_path, text)
    with pytest.raises(ConfigError, match=told):
        open_seal(config(signing_keys_file=file))
    assert told.replace("\\", "") in refusal(signing_keys_command=printing(text))


def test_another_tenants_seal_can_be_asked_for(tmp_path: Path) -> None:
    file = key_file(tmp_path, LINE + f"acme-1 acme {SECRET}\n")
    settings = config(signing_keys_file=file)
    assert open_seal(settings).key_ids == "signing ['key-1']"
    assert open_seal(settings, tenant="acme").key_ids == "signing ['acme-1']"


def test_no_shell_reads_a_command(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    refusal(signing_keys_command=f"{sys.executable} -c pass ; touch {mark} $(touch {mark})")
    assert not mark.exists()


def test_a_command_that_fails_is_told_without_what_it_said() -> None:
    assert "No such file" in refusal(signing_keys_command="/nowhere/at-all")
    failing = f"import sys; print({SECRET!r}); sys.exit({SECRET!r})"
    told = refusal(signing_keys_command=shlex.join([sys.executable, "-c", failing]))
    assert told.endswith("failed with exit status 1")
    assert "No closing quotation" in refusal(signing_keys_command="cat 'x")


@pytest.mark.parametrize(
    ("command", "patience_s", "told"),
    [
        ("sleep 600", 0.05, "did not finish within 0.05 s"),
        # Its own program goes on, and holds the pipe.
        ("/bin/sh -c 'sleep 5 & echo $0'", 0.3, "did not finish within 0.3 s"),
        ("yes", 60.0, "exceeds 1048576 bytes"),
    ],
)
def test_a_command_that_does_not_end_is_ended(
    command: str, patience_s: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("objkv.assembly.seal._COMMAND_S", patience_s)
    assert told in refusal(signing_keys_command=command)


def test_settings_that_contradict_each_other_are_refused() -> None:
    for kind in ("signing", "encryption"):
        with pytest.raises(ConfigError, match=f"{kind}_keys_file and {kind}_keys_command"):
            load_config({f"{kind}_keys_file": "/k", f"{kind}_keys_command": "c"}, environ={})
    for given in ({"signing_keys_command": "c"}, {"encryption_keys_file": "/k"}):
        with pytest.raises(ConfigError, match="the keys that are set are for"):
            load_config({"seals": "signed,encrypted"} | given, environ={})
    with pytest.raises(ConfigError, match="name how payloads are sealed: signed, encrypted"):
        load_config({"seals": "sealed"}, environ={})
    for given in ({"seals": "encrypted"}, {"encryption_keys_file": "/k"}):
        with pytest.raises(ConfigError, match="they are the prompt"):
            load_config({"store_tokens": True} | given, environ={})
    load_config({"signing_keys_command": "c", "store_tokens": True}, environ={})


def test_what_a_command_is_given_is_not_shown() -> None:
    settings = config(signing_keys_command="fetch --password hunter2", encryption_keys_command="x")
    assert "hunter2" not in repr(settings) + str(settings.public())
    assert settings.public()["signing_keys_command"] == "fetch"


def test_a_missing_library_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **named: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(f"No module named {name!r}", name=name)
        return real(name, *args, **named)

    seal.load_aes.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    assert "objkv[encryption]" in refusal(encryption_keys_file=key_file(tmp_path))
    assert open_seal(config(signing_keys_file=key_file(tmp_path))) is not None
    monkeypatch.undo()
    seal.load_aes()


def test_the_identity_tells_how_payloads_are_sealed_and_not_with_which_keys() -> None:
    assert open_seal(config()) is None
    assert sealed_extra((("a", "b"),), config().seal_kinds) == (("a", "b"),)
    signed = config(signing_keys_command="c")
    both = config(signing_keys_command="c", encryption_keys_command="d")
    assert sealed_extra((("z", ""),), signed.seal_kinds) == (("payloads", "signed"), ("z", ""))
    assert sealed_extra((), both.seal_kinds) == (("payloads", "signed encrypted"),)
    other = config(signing_keys_file=Path("/elsewhere"))
    assert sealed_extra((), other.seal_kinds) == sealed_extra((), signed.seal_kinds)
    assert config(seals="signed").seal_kinds == signed.seal_kinds, "the keys are the agent's"
    assert config(seals="encrypted, signed").seal_kinds == both.seal_kinds
    assert config(seals="signed", signing_keys_command="c").seal_kinds == signed.seal_kinds


def test_of_payloads_that_are_sealed_no_namespace_without_seals_counts_as_verified(
    tmp_path: Path,
) -> None:
    """Its document follows the settings of a replica, which could be others than the agent's."""
    plain = StoredNamespace("0" * 32, is_known=True, tenant="default")
    sealed = replace(plain, seals=("signed",))
    seal_of = open_seals(config(signing_keys_file=key_file(tmp_path)))
    assert seal_of(sealed) is not None
    with pytest.raises(ConfigError, match="not in this namespace"):
        seal_of(plain)
    with pytest.raises(ConfigError, match="not in this namespace"):
        open_seals(config(seals="signed"))(plain)
    assert open_seals(config())(plain) is None
