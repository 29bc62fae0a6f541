"""A client of the agent's HTTP interface on its Unix socket, for commands."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeVar

from objkv.agent.http.status import AgentStatus, LoggedWarning, StoreStatus
from objkv.agent.peers import connect_to
from objkv.agent.prefetch import Matched, NamespaceFacts, Prefetched
from objkv.errors import ConfigError, StoreError, StoreUnavailable
from objkv.keys.prefix import PromptExtras

T = TypeVar("T")
_ANSWER_BYTES_MAX = 1 << 20
_OK, _BAD_REQUEST = 200, 400


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt in a namespace: its token ids, or its prefix hashes if these are known."""

    namespace: str
    tokens: Sequence[int] = ()
    extras: PromptExtras = field(default_factory=PromptExtras)
    hashes: Sequence[bytes] | None = None

    def plain(self) -> dict[str, Any]:
        """Return its keys in a request."""
        if self.hashes is not None:
            hashes = [one.hex() for one in self.hashes]
            return {"namespace": self.namespace, "hashes": hashes}
        found: dict[str, Any] = {"namespace": self.namespace, "tokens": list(self.tokens)}
        if self.extras.salt is not None:
            found["cache_salt"] = self.extras.salt
        if self.extras.lora_digest is not None:
            found["lora_digest"] = self.extras.lora_digest.hex()
        return found


class AgentApi:
    """Calls the agent whose HTTP socket is ``path``. Raises ``StoreUnavailable`` if none answers
    within ``answer_s``, ``ConfigError`` for a wrong question, and ``StoreError``."""

    def __init__(self, path: Path, *, answer_s: float = 30.0) -> None:
        self._path, self._answer_s = path, answer_s

    def namespaces(self) -> list[NamespaceFacts]:
        """Return the namespaces with chunks."""
        answer = self._ask("GET", "/v1/namespaces")
        return [_read(NamespaceFacts, one) for one in answer.get("namespaces", ())]

    def status(self) -> AgentStatus:
        """Return the agent's state, after it has called its stores."""
        answer = self._ask("GET", "/v1/status")
        read = {"stores": StoreStatus, "warnings": LoggedWarning}
        for name, kind in read.items():
            answer[name] = [_read(kind, one) for one in answer.get(name, ())]
        return _read(AgentStatus, answer)

    def match(self, prompt: AskedPrompt) -> Matched:
        """Return how much of a prompt is stored, and in memory."""
        return _read(Matched, self._ask("POST", "/v1/match", prompt.plain()))

    def prefetch(self, prompt: AskedPrompt, deadline_s: float) -> Prefetched:
        """Have the stored part of a prompt fetched. Does not wait for it."""
        body = prompt.plain() | {"deadline_ms": max(1, int(deadline_s * 1000))}
        return _read(Prefetched, self._ask("POST", "/v1/prefetch", body))

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        connection = HTTPConnection("agent", timeout=self._answer_s)
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(self._answer_s)
            connect_to(connection.sock, self._path)
            connection.request(method, path, None if body is None else json.dumps(body))
            found = connection.getresponse()
            status, content = found.status, found.read(_ANSWER_BYTES_MAX)
        except (OSError, HTTPException) as exc:
            why = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            place = str(self._path).removesuffix(".http")
            raise StoreUnavailable(
                f"no agent answers at {place} ({why}): start one with objkv agent --socket {place}"
            ) from exc
        finally:
            connection.close()
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise StoreError(f"{path}: the agent's answer is not JSON (status {status})") from exc
        if status == _OK and isinstance(answer, dict):
            return answer
        reason = answer.get("error") if isinstance(answer, dict) else None
        kind = ConfigError if status == _BAD_REQUEST else StoreError
        raise kind(str(reason or f"{path}: the agent answered with status {status}"))


def _read(kind: type[T], answer: dict[str, Any]) -> T:
    """Return an answer, which may have keys that this version does not know."""
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in answer.items() if name in names})
    except TypeError as exc:
        raise StoreError("the agent is of another version: restart it") from exc
