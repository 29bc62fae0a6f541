"""Reads the keys that payloads are sealed with: from files, or from commands.

A key is in nothing that this module says: errors tell the file, the line and what to change.
"""

import os
import selectors
import shlex
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from objkv.codec.seal import KEYS_BYTES_MAX, Seal, SealKey, keys_of, parse_keys
from objkv.config import Config
from objkv.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_seal(
    config: Config, *, tenant: str | None = None, seals: tuple[str, ...] | None = None
) -> Seal | None:
    """The seal of ``tenant``, by default the configured one; None where none is asked for.

    ``seals``: in which of the ways ``signed`` and ``encrypted``; by default as configured. Reads
    key files and runs key commands, once each. Raises ``ConfigError``, also where keys for one of
    these ways are not configured.
    """
    seals = config.seals if seals is None else seals
    if not seals:
        return None
    tenant = config.tenant if tenant is None else tenant
    signing = _keys("signing", config, tenant) if "signed" in seals else []
    encryption = _keys("encryption", config, tenant) if "encrypted" in seals else []
    try:
        return Seal(signing, encryption)
    except ImportError as exc:
        raise ConfigError(
            "payloads are to be encrypted, and the library for that is missing: pip install "
            f'"objkv[encryption]" ({exc.name})'
        ) from None


def _keys(kind: str, config: Config, tenant: str) -> list[SealKey]:
    """Of ``signing`` or ``encryption``."""
    file, command = (getattr(config, f"{kind}_keys_{source}") for source in ("file", "command"))
    if file is not None:
        name = f"{kind}_keys_file {file}"
        text = _read(name, file)
    elif command:
        name = f"{kind}_keys_command"
        text = _run(name, command, config.keys_command_deadline_ms / 1000)
    else:
        raise ConfigError(
            f"payloads are sealed, and their keys are not here: set {kind}_keys_file or "
            f"{kind}_keys_command"
        )
    try:
        keys = keys_of(parse_keys(text), tenant)
    except ValueError as exc:
        raise ConfigError(f"{name}: {exc}") from None
    if not keys:
        raise ConfigError(f"{name}: no key of tenant {tenant!r}, nor of '*'")
    return keys


def _read(name: str, file: Path) -> str:
    """Raises ``ConfigError`` also for a file that others than its owner may read."""
    try:
        # A pipe would be waited for until somebody writes into it.
        number = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"{name}: {exc.strerror}") from None
    try:
        # What was opened is looked at, not what is there by now.
        _refuse_shared(name, os.fstat(number))
        content = b""
        while part := os.read(number, KEYS_BYTES_MAX + 1 - len(content)):
            content += part
    except OSError as exc:
        raise ConfigError(f"{name}: {exc.strerror}") from None
    finally:
        os.close(number)
    return _text(name, content)


def _refuse_shared(name: str, told: os.stat_result) -> None:
    if not stat.S_ISREG(told.st_mode):
        raise ConfigError(f"{name}: not a file")
    if told.st_mode & _OTHERS:
        raise ConfigError(
            f"{name}: others than its owner may read or change it (mode "
            f"{stat.S_IMODE(told.st_mode):04o}): chmod 600 it"
        )
    if told.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{name}: it belongs to another user: chown it")


def _run(name: str, command: str, deadline_s: float) -> str:
    """What the command prints; no shell reads it. Raises ``ConfigError``, which tells nothing of
    what it printed."""
    try:
        words = shlex.split(command)
    except ValueError as exc:
        raise ConfigError(f"{name}: {exc}") from None
    if not words:
        raise ConfigError(f"{name}: empty")
    try:
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            content = _printed(process, deadline_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{name}: {words[0]} has not ended within {deadline_s:g} s (keys_command_deadline_ms)"
        ) from None
    except OSError as exc:
        raise ConfigError(f"{name}: {words[0]}: {exc.strerror}") from None
    if process.returncode != 0 and len(content) <= KEYS_BYTES_MAX:
        raise ConfigError(f"{name}: {words[0]} ended with {process.returncode}")
    return _text(name, content)


def _printed(process: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    """All that it prints, or one byte more than keys may have; it has ended, or is killed. Raises
    ``TimeoutExpired``, also for a program that it started and that goes on."""
    assert process.stdout is not None
    ends_s, content = time.monotonic() + deadline_s, b""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(content) <= KEYS_BYTES_MAX:
                if not selector.select(max(0.0, ends_s - time.monotonic())):
                    raise subprocess.TimeoutExpired(process.args, deadline_s)
                part = os.read(process.stdout.fileno(), KEYS_BYTES_MAX + 1 - len(content))
                if not part:
                    process.wait(max(0.0, ends_s - time.monotonic()))
                    break
                content += part
        return content
    finally:
        process.kill()


def _text(name: str, content: bytes) -> str:
    if len(content) > KEYS_BYTES_MAX:
        raise ConfigError(f"{name}: longer than {KEYS_BYTES_MAX} bytes")
    with suppress(UnicodeDecodeError):  # which holds what it could not read
        return content.decode("utf-8-sig")
    raise ConfigError(f"{name}: not text")
