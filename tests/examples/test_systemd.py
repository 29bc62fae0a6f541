"""The units, by systemd itself and by objkv's command line. systemd does not start them."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from objkv.ops.doctor.access import COMMAND_ROLES
from tests.examples.commands import parsed
from tests.examples.places import EXAMPLES, need

UNITS = EXAMPLES / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
PROGRAM = "/opt/objkv/bin/objkv"
EXPOSED_MAX = 20
"""Tenths of systemd's own measure, from 0 (safe) to 100; below 20 it calls a service "OK"."""


def settings(unit: Path) -> dict[str, str]:
    """The last value of each key."""
    lines = (line for line in unit.read_text().splitlines() if "=" in line)
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def analyze(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = need(
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


def test_systemd_has_nothing_to_say(installed: Path) -> None:
    units = sorted(installed.glob("objkv-*.*"))
    files = [str(unit) for unit in units if unit.is_file()]
    assert len(files) == 5
    done = analyze(installed, "verify", *files)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    bad = installed / "objkv-bad.service"
    bad.write_text("[Service]\nExecStart=/bin/true\nProtectSistem=yes\n")
    assert "ProtectSistem" in analyze(installed, "verify", str(bad)).stderr


def test_services_may_do_little(installed: Path) -> None:
    for unit in SERVICES:
        words = ("security", "--offline=yes", f"--threshold={EXPOSED_MAX}", unit.name)
        done = analyze(installed, *words)
        assert done.returncode == 0, done.stdout[-500:]


def test_each_command_is_objkvs_and_its_role_may_run_it() -> None:
    for unit in SERVICES:
        program, *words = shlex.split(settings(unit)["ExecStart"])
        assert program == PROGRAM
        command = parsed(words)
        assert unit.name == f"objkv-{command}.service"
        role = Path(settings(unit)["EnvironmentFile"]).stem
        name = f"{command} --apply" if "--apply" in words else command
        assert role in COMMAND_ROLES[name]


def test_each_timer_has_its_service() -> None:
    for timer in UNITS.glob("*.timer"):
        assert timer.with_suffix(".service") in SERVICES
        words = ("calendar", settings(timer)["OnCalendar"])
        assert analyze(UNITS, *words).returncode == 0
