"""Reads the keys that seal payloads, from files or from commands.

No message of this module contains a key: errors name the file, the line and the change to make.
"""

import os
import selectors
import shlex
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from objkv.codec.seal import KEYS_BYTES_MAX, Seal, SealKey, keys_of, parse_keys
from objkv.config import Config
from objkv.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from objkv.ops.backends_view import StoredNamespace

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_COMMAND_S = 10.0
"""How long the start of a process waits for a command: a vault answers in one second."""


def open_seal(
    config: Config, *, tenant: str | None = None, seals: tuple[str, ...] | None = None
) -> Seal | None:
    """Return the seal of ``tenant``, by default the configured one, if payloads are sealed.

    ``seals``: the ways to seal, ``signed`` and ``encrypted``; by default as configured. Reads key
    files and runs key commands, once each. Raises ``ConfigError``, also for missing keys.
    """
    seals = config.seal_kinds if seals is None else seals
    if not seals:
        return None
    tenant = config.tenant if tenant is None else tenant
    signing = _keys("signing", config, tenant) if "signed" in seals else []
    encryption = _keys("encryption", config, tenant) if "encrypted" in seals else []
    try:
        return Seal(signing, encryption)
    except ImportError as exc:
        raise ConfigError(
            f"encryption needs a library that is not installed ({exc.name}): "
            f"{pip_install('encryption')}"
        ) from None


def open_seals(config: Config) -> Callable[["StoredNamespace"], Seal | None]:
    """Return a function that gives a namespace's seal. It raises ``ConfigError`` if the keys are
    not configured here, or if only the namespace is not sealed: forged payloads would pass."""
    # Once per tenant rather than per namespace: requesting keys may take seconds.
    seal = lru_cache(partial(open_seal, config))

    def seal_of(namespace: "StoredNamespace") -> Seal | None:
        """The document names the seals, and the namespace is its digest, so it cannot be forged.
        Without a document the configured seals apply."""
        if not namespace.is_known:
            return seal()
        if config.seal_kinds and not namespace.seals:
            raise ConfigError(
                f"payloads are {' and '.join(config.seal_kinds)} by the settings, but not in this "
                "namespace, where forged ones cannot be detected: to check for damage only, unset "
                "seals and the keys"
            )
        return seal(tenant=namespace.tenant, seals=namespace.seals)

    return seal_of


def _keys(kind: str, config: Config, tenant: str) -> list[SealKey]:
    """``kind`` is ``signing`` or ``encryption``."""
    file, command = (getattr(config, f"{kind}_keys_{source}") for source in ("file", "command"))
    if file is not None:
        name = f"{kind}_keys_file {file}"
        text = _read(name, file)
    elif command:
        name = f"{kind}_keys_command"
        text = _run(name, command)
    else:
        raise ConfigError(
            f"payloads are sealed, but the {kind} keys are not configured: set "
            f"{kind}_keys_file or {kind}_keys_command"
        )
    try:
        keys = keys_of(parse_keys(text), tenant)
    except ValueError as exc:
        raise ConfigError(f"{name}: {exc}") from None
    if not keys:
        raise ConfigError(f"{name}: there is no key for tenant {tenant!r} or '*'")
    return keys


def _read(name: str, file: Path) -> str:
    """Raise ``ConfigError`` also for a file that others than its owner may read."""

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for a writer

    try:
        with open(file, "rb", opener=opener) as opened:
            # Check the opened file, not the one that is at the path by now.
            _refuse_shared(name, os.fstat(opened.fileno()))
            content = opened.read(KEYS_BYTES_MAX + 1)
    except OSError as exc:
        raise ConfigError(f"{name}: {exc.strerror}") from None
    return _text(name, content)


def _refuse_shared(name: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{name} is not a regular file")
    if found.st_mode & _OTHERS:
        raise ConfigError(
            f"{name}: other users may read or change it (mode "
            f"{stat.S_IMODE(found.st_mode):04o}): run chmod 600 on it"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{name} belongs to another user: run chown on it")


def _run(name: str, command: str) -> str:
    """Return the output of a command, run without a shell. Raises ``ConfigError`` without it."""
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
            content = _printed(process)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name}: {words[0]} did not finish within {_COMMAND_S:g} s") from None
    except OSError as exc:
        raise ConfigError(f"{name}: {words[0]}: {exc.strerror}") from None
    if process.returncode != 0 and len(content) <= KEYS_BYTES_MAX:
        raise ConfigError(f"{name}: {words[0]} failed with exit status {process.returncode}")
    return _text(name, content)


def _printed(process: subprocess.Popen[bytes]) -> bytes:
    """Return all output, or one byte more than keys may have. The process has then ended or is
    killed. Raises ``TimeoutExpired``, also if a child of the process keeps its output open."""
    assert process.stdout is not None
    ends_s, content = time.monotonic() + _COMMAND_S, b""
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while len(content) <= KEYS_BYTES_MAX:
                if not selector.select(max(0.0, ends_s - time.monotonic())):
                    raise subprocess.TimeoutExpired(process.args, _COMMAND_S)
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
        raise ConfigError(f"{name} exceeds {KEYS_BYTES_MAX} bytes")
    with suppress(UnicodeDecodeError):  # the exception holds the unreadable content
        return content.decode("utf-8-sig")
    raise ConfigError(f"{name} is not UTF-8 text")
