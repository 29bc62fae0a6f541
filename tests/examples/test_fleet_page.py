"""``docs/fleet.md``, followed on loopback: what it runs, then an agent and a sweep by the units."""

import os
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from objkv.agent.client import is_listening
from tests.examples.places import EXAMPLES, ROOT, unit_settings
from tests.support.agents import agent_folder
from tests.support.servers.quick_s3 import quick_s3_process
from tests.support.servers.redis import RedisServer, valkey_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "fleet.md").read_text()
SOCKET = "/run/objkv/agent.sock"
SETTINGS = ". /etc/objkv/settings.env\n"


def started(unit: str) -> str:
    lines = unit_settings(EXAMPLES / "systemd" / f"objkv-{unit}.service")
    program, words = lines["ExecStart"].split(" ", 1)
    assert program == "/opt/objkv/bin/objkv"
    return f"set -a\n{SETTINGS}. {lines['EnvironmentFile']}\nexec objkv {words}"


class Machine:
    """The page's machine: its folders are below one of the test, and its servers on loopback."""

    def __init__(self, folder: Path, bucket: str, socket: Path) -> None:
        self.socket = socket
        self._places = {
            "/etc/": f"{folder}/etc/",
            "http://s3.internal:9000": bucket,
            SOCKET: str(socket),
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT)}

    def serve(self, server: RedisServer) -> None:
        self._places["redis://gpu-1:6379"] = server.url

    def start(self, script: str) -> "subprocess.Popen[str]":
        for theirs, ours in self._places.items():
            script = script.replace(theirs, ours)
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = ["/bin/bash", "-euo", "pipefail", "-c", script]
        return subprocess.Popen(command, env=self._environment, **pipe)  # type: ignore[call-overload,no-any-return]

    def run(self, script: str) -> None:
        with self.start(script) as process:
            out, _ = process.communicate()
        assert process.returncode == 0, out


def options(conf: str) -> list[str]:
    """Valkey's configuration as arguments, without its address, which is the test's."""
    lines = conf.splitlines()
    assert lines[:2] == ["bind 0.0.0.0", "port 6379"]
    return list(chain.from_iterable(shlex.split(f"--{line}") for line in lines[2:]))


def test_the_page_leads_to_a_fleet_that_works(tmp_path: Path) -> None:
    settings, users, valkey, check = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    with quick_s3_process() as bucket, agent_folder() as sockets:
        machine = Machine(tmp_path, bucket.url, sockets / "agent.sock")
        machine.run(settings + users + valkey)
        conf = (tmp_path / "etc/valkey/valkey.conf").read_text()
        with valkey_server(tmp_path / "valkey", args=options(conf)) as server:
            machine.serve(server)
            machine.run(settings)  # with the server's port
            machine.run(f"set -a\n{SETTINGS}{check}")
            with machine.start(started("agent")) as agent:
                try:
                    wait_until(lambda: is_listening(machine.socket) or agent.poll() is not None)
                finally:
                    agent.terminate()
                out, _ = agent.communicate()
            assert (agent.returncode, "agent ready" in out) == (0, True), out
            machine.run(started("sweep"))
