"""A server that talks as vLLM's does and saves as a replica does, and fails as it is told."""

import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from objkv.index.base import WriteIndex
from objkv.keys.identity import Identity
from objkv.keys.prefix import PromptExtras, prefix_hashes
from objkv.stores.base import WriteStore
from tests.support.samples import CHUNK, IDENTITY, save, save_identity

MODEL = "tiny"
LONGEST = 40 * CHUNK
Fault = Callable[["Handler"], bool]
"""Does something to a completion; whether it was answered."""


@dataclass
class Asked:
    """One completion that was computed."""

    tokens: tuple[int, ...]
    salt: str | None
    model: str
    stored_before: int
    """Chunks of it that were stored when it came."""


@dataclass
class Place:
    """Where fake replicas save."""

    bulk: WriteStore
    index: WriteIndex
    identity: Identity = IDENTITY

    def stored(self, tokens: Sequence[int], salt: str | None = None) -> int:
        namespace = self.identity.namespace()
        hashes = prefix_hashes(namespace, tokens, CHUNK, PromptExtras(salt=salt))
        found = self.index.lookup(namespace, hashes) if hashes else []
        return sum(record is not None for record in found)

    def save(self, tokens: Sequence[int], salt: str | None = None) -> None:
        save_identity(self.bulk, self.identity)
        save(self.bulk, self.index, tokens, namespace=self.identity.namespace(), salt=salt)


class FakeVllm:
    """Listens while its block lasts. Its node's agent holds back what no request says to put.
    ``faults`` happen to one completion each, in order."""

    def __init__(
        self, place: Place, *, model: str = MODEL, faults: Sequence[Fault] = (), saves: bool = True
    ) -> None:
        self.place = place
        self.model = model
        self.saves = saves
        self.faults = deque(faults)
        self.every: Fault | None = None
        """Happens to every completion, if there is one."""
        self.probe_faults: deque[Fault] = deque()
        """Happen to probes, in order."""
        self.asked: list[Asked] = []
        self.headers: list[dict[str, str]] = []
        self.under_way: list[tuple[int, ...]] = []
        self.together: list[tuple[tuple[int, ...], ...]] = []
        """What was under way when each completion came."""
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.fake = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(0.01), daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Nobody is there any more."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def real(self) -> list[Asked]:
        """What was asked, without the probe."""
        return [one for one in self.asked if not (one.salt or "").startswith("objkv-warm-")]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeVllm

    def __init__(self, *arguments: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    """Of one connection."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Tests look at what was asked."""

    def answer(self, status: int, value: object = None, **headers: str) -> bool:
        body = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return True

    def do_GET(self) -> None:
        fake = self.server.fake
        if self.path == "/v1/models":
            cards = [
                {"id": fake.model, "root": "acme/tiny"},
                {"id": "lawyer", "root": "/adapters/x", "parent": fake.model},
            ]
            self.answer(200, {"data": cards})
        else:
            self.answer(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        fake = self.server.fake
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.headers.append(dict(self.headers))
        if self.path == "/tokenize":
            words = request.get("prompt") or " ".join(m["content"] for m in request["messages"])
            tokens = [int(word) for word in words.split()]
            self.answer(200, {"tokens": tokens, "count": len(tokens)})
        else:
            self._complete(request)

    def _complete(self, request: dict[str, Any]) -> None:
        fake = self.server.fake
        tokens, salt = tuple(request["prompt"]), request.get("cache_salt")
        if request["model"] != fake.model:
            self.answer(
                404, {"error": {"message": f"The model {request['model']} does not exist."}}
            )
            return
        if len(tokens) >= LONGEST:
            self.answer(400, {"error": {"message": f"maximum context length is {LONGEST}"}})
            return
        with fake.lock:
            stored = fake.place.stored(tokens, salt)
            fake.asked.append(Asked(tokens, salt, request["model"], stored))
            fake.under_way.append(tokens)
            fake.together.append(tuple(fake.under_way))
            is_probe = (salt or "").startswith("objkv-warm-")
            faults = fake.probe_faults if is_probe else fake.faults
            fault = faults.popleft() if faults else fake.every
        try:
            if fault is not None and fault(self):
                return
            if fake.saves and request.get("kv_transfer_params") == {"objkv_put": True}:
                fake.place.save(tokens, salt)
            details = {"cached_tokens": stored * CHUNK}
            usage = {"prompt_tokens": len(tokens), "prompt_tokens_details": details}
            self.answer(200, {"choices": [], "usage": usage})
        finally:
            with fake.lock:
                fake.under_way.remove(tokens)


def status(code: int, **headers: str) -> Fault:
    """Answers so."""
    return lambda handler: handler.answer(code, {"error": {"message": "told so"}}, **headers)


def of_prompts(fault: Fault) -> Fault:
    """Only of what is no probe."""

    def some(handler: Handler) -> bool:
        salt = handler.server.fake.asked[-1].salt or ""
        return not salt.startswith("objkv-warm-") and fault(handler)

    return some


def reset(handler: Handler) -> bool:
    """Hangs up in the middle."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
    return True


def dropped(handler: Handler) -> bool:
    """Computes it, and does not save it."""
    usage = {"prompt_tokens": len(handler.server.fake.under_way[-1])}
    return handler.answer(200, {"choices": [], "usage": usage})


@dataclass
class Gate:
    """Lets nothing through until it is opened."""

    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handler: Handler) -> bool:
        self.opened.wait(60)
        return False
