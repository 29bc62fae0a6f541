"""The units, by systemd itself and by objkv's command line. systemd does not start them."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from objkv.config import Config, load_config
from objkv.config.node import agent_socket
from objkv.ops.doctor.access import COMMAND_ROLES
from tests.examples.places import EXAMPLES, need_program, parsed, unit_settings

UNITS = EXAMPLES / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
PROGRAM = "/opt/objkv/bin/objkv"
EXPOSED_MAX = 20
"""Tenths of systemd's own measure, from 0 (safe) to 100; below 20 it calls a service "OK"."""


def analyze(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = need_program(
        shutil.which("systemd-analyze"), "systemd-analyze is missing: apt-get install systemd"
    )
    return subprocess.run(
        [program, *words],
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units, with a program that exists."""
    folder = shutil.copytree(UNITS, tmp_path_factory.mktemp("systemd") / "system")
    for unit in folder.glob("*.service"):
        unit.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    return folder


def test_systemd_has_nothing_to_say_and_services_may_do_little(installed: Path) -> None:
    files = [str(unit) for unit in sorted(installed.glob("objkv-*.*")) if unit.is_file()]
    assert len(files) == 6
    done = analyze(installed, "verify", *files)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for unit in SERVICES:
        words = ("security", "--offline=yes", f"--threshold={EXPOSED_MAX}", unit.name)
        done = analyze(installed, *words)
        assert done.returncode == 0, done.stdout[-500:]
    for timer in UNITS.glob("*.timer"):
        assert timer.with_suffix(".service") in SERVICES
        assert analyze(UNITS, "calendar", unit_settings(timer)["OnCalendar"]).returncode == 0


def test_each_command_is_objkvs_and_its_role_may_run_it() -> None:
    for unit in SERVICES:
        program, *words = shlex.split(unit_settings(unit)["ExecStart"])
        assert program == PROGRAM
        command = parsed(words)
        assert unit.name == f"objkv-{command}.service"
        role = Path(unit_settings(unit)["EnvironmentFile"]).stem
        if command == "agent":
            assert role == "writer"
            continue
        name = f"{command} --apply" if "--apply" in words else command
        assert role in COMMAND_ROLES[name]


AGENT = UNITS / "objkv-agent.service"
AGENT_OWN = UNITS / "objkv-agent.service.d" / "20-agent.conf"


def test_an_agents_memory_user_and_socket_are_those_of_its_replicas() -> None:
    own = unit_settings(AGENT_OWN)
    # systemd reads drop-ins by their names, so this one has the last word.
    assert AGENT_OWN.name > "10-hardening.conf"
    assert own["DynamicUser"] == "no", "replicas could not connect"
    name, _, arena = own["Environment"].partition("=")
    config = load_config(environ={name: arena})
    assert own["MemoryMax"] == f"{(config.agent_memory_bytes * 5 // 4 >> 20) + 256}M"
    socket = shlex.split(unit_settings(AGENT)["ExecStart"])[-1]
    assert Path(socket).parent == Path("/run") / own["RuntimeDirectory"]
    page = (UNITS / "README.md").read_text()
    (told,) = (line for line in page.splitlines() if "OBJKV_AGENT=" in line)
    variable, _, value = told.split()[1].partition("=")
    assert agent_socket(load_config(environ={variable: value})) == Path(socket)
    config, unit = Config(), unit_settings(AGENT)
    needed_s = (config.load_deadline_ms + config.drain_deadline_ms) / 1000
    assert int(unit["TimeoutStopSec"]) > needed_s
    assert (unit["KillSignal"], unit["Restart"]) == ("SIGTERM", "on-failure")
