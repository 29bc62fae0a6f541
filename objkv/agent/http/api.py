"""The agent's answers over HTTP, on a Unix socket next to its own and, if set, on an address.

``GET /healthz``, ``/metrics``, ``/v1/namespaces`` and ``/v1/status``; ``POST /v1/match`` and
``/v1/prefetch`` with a JSON object. Errors are JSON with the fix. Clients of an address need the
agent's token, except for ``/healthz``; those of the Unix socket are of the agent's own user.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Any

from objkv.agent.http import listener, prompts
from objkv.agent.http.listener import Bodies, HttpListener, StartResponse, admit, skip_body
from objkv.agent.http.prompts import Body
from objkv.agent.http.status import NodeStatus
from objkv.agent.prefetch import Prefetches
from objkv.errors import ConfigError, ObjkvError
from objkv.keys.tokenizer import Tokenizers


def read_json(content: bytes, *, is_local: bool) -> Body:
    """Return the object in a body. ``is_local``: the client is of the same user, so that it may
    name files. Raises ``ConfigError``, also for names that are not known."""
    if not content:
        raise ConfigError(f"send a JSON object of at most {listener.BODY_BYTES_MAX} bytes")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise ConfigError("the body is not a JSON object")
    if unknown := sorted(body.keys() - prompts.KNOWN):
        known = ", ".join(sorted(prompts.KNOWN))
        raise ConfigError(f"{unknown[0][:100]!r} is unknown: use {known}")
    if not is_local and body.get("tokenizer") is not None:
        raise ConfigError("tokenizer: only clients of the Unix socket may name a file")
    return body


class AgentHttp:
    """Serves until it is closed."""

    def __init__(
        self,
        path: Path,
        prefetches: Prefetches,
        status: NodeStatus,
        *,
        address: tuple[str, int] | None = None,
        token: str = "",
        tokenizers: Path | None = None,
    ) -> None:
        """``path``: of the Unix socket. ``address``: host and port. ``token``: the bearer token
        there. ``tokenizers``: folder of files for requests. Raises ``ConfigError``."""
        if address is not None and not token:
            raise ConfigError("an agent that listens on an address needs a token")
        self._prefetches, self._status = prefetches, status
        self._tokenizers = Tokenizers(tokenizers)
        self._path, self._token = path, _digest(token.encode())
        self._bodies = Bodies()
        self._listeners = [HttpListener(path, self._answer_local)]
        if address is not None:
            try:
                self._listeners.append(HttpListener(address, self._answer_remote))
            except ConfigError:
                self.close()
                raise

    def restore(self) -> None:
        """Serve the Unix socket again if something has removed it. Raises ``ConfigError``."""
        if self._listeners[0].is_lost:
            self._listeners[0].close()
            self._listeners[0] = HttpListener(self._path, self._answer_local)

    def close(self) -> None:
        """Stop. Idempotent."""
        for one in self._listeners:
            one.close()

    def _answer_local(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        admit(environ)
        return self._answer(environ, start, is_local=True)

    def _answer_remote(self, environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        if self._is_allowed(environ):
            admit(environ)
        elif environ.get("PATH_INFO") != "/healthz":
            skip_body(environ)
            text = "send the agent's token in a header: Authorization: Bearer TOKEN"
            more = ("WWW-Authenticate", 'Bearer realm="objkv"')
            return _say(start, "401 Unauthorized", {"error": text}, more)
        return self._answer(environ, start, is_local=False)

    def _is_allowed(self, environ: Mapping[str, Any]) -> bool:
        """Compare the token in a time that does not depend on it."""
        scheme, _, token = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        return compare_digest(_digest(token.encode("latin-1", "replace")), self._token)

    def _answer(
        self, environ: dict[str, Any], start: StartResponse, *, is_local: bool
    ) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", "/"), environ.get("REQUEST_METHOD")
        reads: dict[str, Callable[[], str | dict[str, Any]]] = {
            "/healthz": self._status.health,
            "/metrics": self._status.metrics,
            "/v1/namespaces": self._namespaces,
            "/v1/status": lambda: asdict(self._status.read()),
        }
        posts = {"/v1/match": self._match, "/v1/prefetch": self._prefetch}
        allowed = "POST" if path in posts else "GET" if path in reads else None
        try:
            if method == allowed == "POST":
                with self._bodies.read(environ) as content:
                    body = read_json(content, is_local=is_local)
                    return _say(start, "200 OK", posts[path](body))
            skip_body(environ)
            if method == allowed:
                return _say(start, "200 OK", reads[path]())
        except ConfigError as exc:
            return _say(start, "400 Bad Request", {"error": str(exc)})
        except ObjkvError as exc:
            return _say(start, "503 Service Unavailable", {"error": str(exc)})
        if allowed is not None:
            text = f"{method} {path}: use {allowed}"
            return _say(start, "405 Method Not Allowed", {"error": text}, ("Allow", allowed))
        known = ", ".join((*reads, *posts))
        return _say(start, "404 Not Found", {"error": f"no {path}: there are {known}"})

    def _namespaces(self) -> dict[str, Any]:
        return {"namespaces": [asdict(one) for one in self._prefetches.namespaces()]}

    def _match(self, body: Body) -> dict[str, Any]:
        return asdict(self._prefetches.match(*self._prompt(body)))

    def _prefetch(self, body: Body) -> dict[str, Any]:
        order = prompts.read_order(body)
        return asdict(self._prefetches.start(*self._prompt(body), order))

    def _prompt(self, body: Body) -> tuple[str, list[bytes]]:
        """Return namespace and prefix hashes. Raises ``ConfigError`` with the fix."""
        namespace = body.get("namespace")
        if not isinstance(namespace, str) or len(namespace) != 32 or not prompts.is_hex(namespace):
            raise ConfigError("namespace: give its 32 hex digits, as /v1/namespaces lists them")
        if body.get("text") is not None:
            prompts.refuse(body, ("tokens", "hashes"), "with text")
            more = {name: value for name, value in body.items() if name in prompts.WITH_TOKENS}
            body = {"tokens": self._tokenized(namespace, body), **more}
        return namespace, prompts.read_hashes(
            body, namespace, lambda: self._prefetches.facts(namespace).chunk_tokens
        )

    def _tokenized(self, namespace: str, body: Body) -> list[int]:
        text, model = prompts.read_text(body, "text") or "", prompts.read_text(body, "model")
        place = prompts.read_text(body, "tokenizer")
        if place is None:
            model = model or self._prefetches.facts(namespace).model
            return self._tokenizers.tokens(text, self._tokenizers.place_of(model))
        if not Path(place).is_absolute() or "\0" in place:
            raise ConfigError("tokenizer: give the absolute path of a tokenizer.json")
        return self._tokenizers.tokens(text, Path(place))


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()


def _say(
    start: StartResponse, status: str, answer: str | dict[str, Any], *more: tuple[str, str]
) -> Iterable[bytes]:
    kind = "text/plain; charset=utf-8"
    if not isinstance(answer, str):
        kind, answer = "application/json", json.dumps(answer) + "\n"
    body = answer.encode()
    head = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Server", "objkv")]
    start(status, [*head, *more])
    return [body]
