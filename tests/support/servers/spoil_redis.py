"""A proxy in front of a real Redis that spoils the answers it is told to.

It speaks RESP 2, one command and its answer at a time: what a client sends in one go is answered in
order, and a turn is a command. Verbs are commands, in capitals. Subscriptions do not go through it.
"""

import socket
from collections import OrderedDict
from typing import BinaryIO

from tests.support.servers.spoil import Spoil, Spoiler, Upstream, flipped, reset

KEPT = 64
LINE_BYTES_MAX = 64 << 10
_TLS = b"\x16"


class SpoilRedis(Spoiler):
    """The proxy; ``url`` is for clients."""

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        self._kept: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()
        super().__init__(target, port=port)
        self.url = f"redis://127.0.0.1:{self.address[1]}/0"

    def serve(self, connection: socket.socket) -> None:
        """Commands of one connection, one after the other."""
        upstream = Upstream(self.target)
        with connection.makefile("rb") as client:
            try:
                while (command := _read_command(client)) is not None:
                    raw, words = command
                    verb = words[0].decode("latin-1").upper()
                    rule = self._rule_for(verb, b" ".join(words[1:4]))
                    if not self._serve(raw, (verb, words), rule, connection, upstream):
                        return
            except OSError:  # the server is gone: so are we
                reset(connection)
            finally:
                upstream.close()

    def _serve(
        self,
        raw: bytes,
        command: tuple[str, list[bytes]],
        rule: Spoil | None,
        connection: socket.socket,
        upstream: Upstream,
    ) -> bool:
        """Whether the connection goes on."""
        verb, words = command
        fault = rule.fault if rule is not None else ""
        if rule is not None and fault == "hook":
            rule.hook()
        if rule is not None and fault == "error":
            connection.sendall(f"-{rule.error}\r\n".encode())
            return True
        if fault == "stall":
            self._stall(connection)
        if fault in ("stall", "reset"):
            reset(connection)
            return False
        answer = _read_answer(upstream.send((raw,)))
        if fault == "unanswered":
            reset(connection)
            return False
        if rule is not None and fault == "lag":
            self._lag(rule.lag_s)
        if fault == "truncate":
            connection.sendall(answer[: len(answer) // 2])
            return False
        if fault == "another":
            answer = self._of_another(verb, words, answer)
        elif fault == "flip":
            answer = _flipped(answer)
        else:
            self._keep(verb, words, answer)
        connection.sendall(answer)
        return True

    def _keep(self, verb: str, words: list[bytes], answer: bytes) -> None:
        if len(words) < 2 or answer[:1] not in b"$*" or len(answer) < 16:
            return
        with self._rules_lock:
            self._kept[verb, words[1]] = answer
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def _of_another(self, verb: str, words: list[bytes], answer: bytes) -> bytes:
        """What the same command was answered for another key, or as it is if none was asked for."""
        if len(words) < 2:
            return answer
        with self._rules_lock:
            for (other, key), kept in reversed(self._kept.items()):
                if other == verb and key != words[1] and len(kept) == len(answer):
                    return kept
        return answer


def _read_command(client: BinaryIO) -> tuple[bytes, list[bytes]] | None:
    """The bytes of the next command, and its words; None at the end, and for a greeting of TLS:
    the server would wait for the rest of it."""
    line = client.readline(LINE_BYTES_MAX)
    if not line or line[:1] == _TLS:
        return None
    if line[:1] != b"*":
        return line, line.split() or [b""]
    raw, words = [line], []
    for _ in range(int(line[1:])):
        size = client.readline(LINE_BYTES_MAX)
        word = client.read(int(size[1:]) + 2)
        raw += size, word
        words.append(word[:-2])
    return b"".join(raw), words


def _read_answer(server: BinaryIO) -> bytes:
    """The bytes of one whole answer."""
    line = server.readline(LINE_BYTES_MAX)
    if not line:
        raise ConnectionError("the server closed the connection")
    kind = line[:1]
    if kind == b"$" and (nbytes := int(line[1:])) >= 0:
        return line + server.read(nbytes + 2)
    if kind == b"*" and (count := int(line[1:])) > 0:
        return line + b"".join(_read_answer(server) for _ in range(count))
    return line


def _flipped(answer: bytes) -> bytes:
    """One bit of the last value in the answer; what has no value stays as it is."""
    if answer[:1] not in b"$*" or len(answer) < 8:
        return answer
    at = answer.rfind(b"\r\n", 0, -2)
    head, value = answer[: at + 2], answer[at + 2 : -2]
    if answer[:1] == b"$":
        end = answer.index(b"\r\n") + 2
        head, value = answer[:end], answer[end:-2]
    return head + flipped(value) + b"\r\n" if value else answer
