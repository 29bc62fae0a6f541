"""Secrets are configured everywhere, and shown nowhere: not by commands, logs, errors or reprs."""

import gc
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html import escape
from pathlib import Path
from socket import socket

import pytest
from typer.testing import CliRunner

from objkv.assembly.backends import open_backends
from objkv.cli.app import COMMANDS as ALL
from objkv.cli.app import app
from objkv.config import resolve_config
from objkv.telemetry import MemoryRecorder
from tests.support.servers.listener import Listener

IN_URL = "url/password+one"
IN_SETTING = "setting:password@two"
KEY_ID = "AKIAOBJKVSECRETTHREE"
SECRET_KEY = "s3/secret+access/four"
SESSION_TOKEN = "session-token//five=="
ENDPOINT_PASSWORD = "endpoint-password-six"
SIGNING_KEY = "00112233445566778899aabbccddeeff" * 2
AGENT_TOKEN = "agent-token-of-the-node-eight"
SECRETS = (
    IN_URL, IN_SETTING, KEY_ID, SECRET_KEY, SESSION_TOKEN, ENDPOINT_PASSWORD, SIGNING_KEY,
    AGENT_TOKEN,
)  # fmt: skip
NOBODY = "127.0.0.1:9"
"""``discard``: nobody listens there on a machine that runs tests."""


class TellTaleRedis(Listener):
    """Refuses every command, and says which it was, as servers do with those they do not know."""

    def serve(self, connection: socket) -> None:
        """Until the other end has enough of it."""
        while data := connection.recv(65536):
            words = re.sub(rb"[\r\n]+", b" ", data)
            refusal = b"-ERR unknown command, with args beginning with: " + words + b"\r\n"
            connection.sendall(refusal * len(re.findall(rb"\*\d+\r\n", data)))


class TellTaleS3(Listener):
    """Denies every request, and says what it was, as servers do whose signatures differ."""

    def serve(self, connection: socket) -> None:
        """Until the other end has enough of it."""
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := connection.recv(65536)):
                return
            head += more
        said = escape(head.decode("latin-1"))
        body = (
            '<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code>'
            f"<Message>{said}</Message><CanonicalRequest>{said}</CanonicalRequest></Error>"
        ).encode()
        connection.sendall(
            b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: application/xml\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), b"" if head[:4] == b"HEAD" else body)
        )


def settings_for(redis: str, s3: str, keys: Path) -> dict[str, str]:
    return {
        "OBJKV_INDEX_URL": f"redis://reader:{IN_URL.replace('/', '%2F')}@{redis}/0",
        "OBJKV_ALLOW_PLAINTEXT": "index,bulk",
        "OBJKV_BULK_URL": "s3://bucket/prefix",
        "OBJKV_S3_ENDPOINT_URL": f"http://{s3}",
        "OBJKV_S3_ACCESS_KEY_ID": KEY_ID,
        "OBJKV_S3_SECRET_ACCESS_KEY": SECRET_KEY,
        "OBJKV_S3_ADDRESSING": "path",
        "OBJKV_SIGNING_KEYS_FILE": str(keys),
        "OBJKV_AGENT_LISTEN": "127.0.0.1:9410",
        "OBJKV_AGENT_TOKEN": AGENT_TOKEN,
        "OBJKV_LOAD_DEADLINE_MS": "300",
        "OBJKV_LOOKUP_DEADLINE_MS": "300",
        "OBJKV_SAVE_DEADLINE_MS": "300",
        "AWS_SESSION_TOKEN": SESSION_TOKEN,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


WORLDS = ("unreachable", "denied", "denied in setting")


@pytest.fixture
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Settings with secrets in every place that may hold one."""
    keys = tmp_path / "keys"
    keys.write_text(f"key-1 * {SIGNING_KEY}\n")
    keys.chmod(0o600)
    with ExitStack() as servers:
        redis = s3 = NOBODY
        if request.param != "unreachable":
            redis, s3 = (
                "{}:{}".format(*servers.enter_context(kind()).address)
                for kind in (TellTaleRedis, TellTaleS3)
            )
        environ = settings_for(redis, s3, keys)
        if request.param == "denied":  # then the client takes what AWS's own variables say
            del environ["OBJKV_S3_ACCESS_KEY_ID"], environ["OBJKV_S3_SECRET_ACCESS_KEY"]
        if request.param == "denied in setting":
            environ |= {"OBJKV_REDIS_PASSWORD": IN_SETTING, "OBJKV_REDIS_USERNAME": "writer"}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield environ


def shown(text: str) -> list[str]:
    """Which secrets are in ``text``, also as URLs, JSON or HTML write them."""
    found = []
    for secret in SECRETS:
        spellings = {secret, secret.replace("/", "%2F"), escape(secret), json.dumps(secret)[1:-1]}
        spellings |= {secret.replace("+", "%2B"), repr(secret)[1:-1]}
        if any(spelling in text for spelling in spellings):
            at = next(text.index(one) for one in spellings if one in text)
            found.append(text[max(0, at - 200) : at + 80])
    return found


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """All that was logged so far as a handler would write it; ours from DEBUG on."""
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, logger="objkv")
    formatter = logging.Formatter("%(name)s %(message)s")
    return lambda: "\n".join(map(formatter.format, caplog.records))


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("doctor",),
    ("ls",),
    ("ls", "--prefixes"),
    ("ls", "--bulk"),
    ("show", "ab" * 20),
    ("match", "--tokens", "-"),
    ("diff", "0" * 32, "1" * 32),
    ("pin", "--list"),
    ("prefetch", "--socket", "/dev/null/none"),
    ("unpin", "ab" * 20),
    ("verify",),
    ("sweep",),
    ("rebuild",),
    ("access", "--role", "writer"),
    ("bench", "--quick"),
    ("admission",),
    ("audit",),
    ("exporter", "--once"),
    ("size", "--model", "llama-3.1-8b", "--rate", "1", "--prompt-tokens", "1000"),
    ("top", "--once", "--endpoint", "http://127.0.0.1:1"),
    ("warm", "--check", "-"),
)


def test_every_command_is_tried() -> None:
    own_servers = {"agent", "demo", "gpu-check"}
    assert set(ALL) == {words[0] for words in COMMANDS} | own_servers


SLOW = ("doctor", "top")


@pytest.mark.parametrize(
    ("world", "words"),
    [
        pytest.param(
            world,
            words,
            marks=[pytest.mark.slow] if words[0] in SLOW else [],
            id=f"{world}: {' '.join(words)}",
        )
        for world in WORLDS
        for words in COMMANDS
        if world == "denied" or words[0] == "doctor"
    ],
    indirect=["world"],
)
def test_no_command_shows_a_secret(
    world: dict[str, str], words: tuple[str, ...], logged: Callable[[], str]
) -> None:
    for options in ((), ("--json",)):
        ran = CliRunner().invoke(app, ["--debug", *words, *options], input="1 2 3")
        assert ran.exception is None or isinstance(ran.exception, SystemExit)
        assert ran.exit_code != 70, ran.output
        assert shown(ran.stdout + ran.stderr) == []
    assert shown(logged()) == []


@pytest.mark.parametrize("world", WORLDS, indirect=True)
def test_no_object_of_the_wiring_shows_a_secret(world: dict[str, str]) -> None:
    resolved = resolve_config(environ=world)
    assert shown(f"{resolved!r} {resolved.config!r} {resolved.config} ") == []
    assert shown(str(resolved.config.public())) == []
    before = set(map(id, gc.get_objects()))
    with open_backends(resolved.config, MemoryRecorder()):
        objects = [
            one
            for one in gc.get_objects()
            # A client's own parts hold the credentials themselves; ours do not print them.
            if re.match(r"objkv|.*\.(Redis|S3)$", f"{type(one).__module__}.{type(one).__name__}")
            if id(one) not in before
        ]
        assert len(objects) > 10
        assert [type(one) for one in objects if shown(repr(one))] == []


def test_what_tells_of_secrets_is_found() -> None:
    for secret in SECRETS:
        assert shown(f"x {secret} y")
    assert not shown("nothing")
