"""A real S3 server on loopback: Ceph's radosgw over one monitor and one storage daemon.

Needs no root and keeps everything in the folder it is given. It is ready after about 15 s, so
a test run starts one and shares it; the daemons die with this process.
"""

import json
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import boto3

from tests.support.servers.ports import free_port, is_accepting
from tests.support.servers.process import Daemon
from tests.support.waiting import wait_for_server

START_S = 240.0
"""Bound of every wait for a daemon."""
_TRY_S = 60.0
"""Bound of a command that is tried again; one that asks a monitor which is not ready may hang."""
ACCESS_KEY = "test"
SECRET_KEY = "testsecret"

_until = partial(wait_for_server, bound_s=START_S)
_PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool")
_STARTS_MAX = 10

# One copy of everything, no authentication between the daemons (they listen on loopback only),
# and no watching over disk space: the host's disk may be fuller than Ceph likes.
_CONF = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v1:127.0.0.1:{mon_port}]
public network = 127.0.0.0/8
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
run dir = {folder}
log file = {folder}/$name.log
crash dir = {folder}
admin socket =
pid file =
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
mon data avail warn = 1
mon data = {folder}/mon
osd data = {folder}/osd
osd journal = {folder}/osd/journal
osd objectstore = memstore
osd memory target = 1073741824
memstore device bytes = 8589934592
[client.rgw]
rgw frontends = beast {listen} tcp_nodelay=1
rgw data = {folder}/rgw
rgw thread pool size = 64
rgw enable usage log = false
rgw enable ops log = false
"""


def ceph_missing() -> str | None:
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if not missing:
        return None
    return (
        f"{', '.join(missing)} missing: "
        "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd"
    )


@dataclass
class S3Server:
    endpoint_url: str
    access_key: str
    secret_key: str
    _folder: Path = field(repr=False)

    def admin(self, *arguments: str) -> None:
        """Run ``radosgw-admin``; again if a busy monitor refused it."""
        conf = ("-c", f"{self._folder}/ceph.conf", "-n", "client.rgw")
        command = ("radosgw-admin", *conf, *arguments)
        _until(lambda: bool(_succeeds(self._folder, *command)), " ".join(command))


class CephUsers:
    """Makes users with policies of their own, as IAM gives them elsewhere.

    Ceph 16 judges by them whatever the bucket's owner; conditions on ``s3:prefix`` are honoured.
    """

    def __init__(self, server: S3Server) -> None:
        self._server = server
        server.admin("caps", "add", "--uid=test", "--caps=user-policy=*")
        self._iam: Any = boto3.client(
            "iam",
            endpoint_url=server.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
        )

    def add(self, name: str, policy: dict[str, Any]) -> tuple[str, str]:
        access_key, secret_key = f"{name}-key", f"{name}-secret"
        self._server.admin(
            *("user", "create", f"--uid={name}", f"--display-name={name}"),
            *(f"--access-key={access_key}", f"--secret-key={secret_key}"),
        )
        document = json.dumps(policy)
        self._iam.put_user_policy(UserName=name, PolicyName="objkv", PolicyDocument=document)
        return access_key, secret_key


@contextmanager
def ceph_radosgw(folder: Path) -> Iterator[S3Server]:
    """Start a server over ``folder``, which is created, and end it afterwards.

    Call it from the main thread: the daemons end with the thread that started them.
    """
    mon_port, port = free_port(), free_port()
    fsid, listen, url = str(uuid.uuid4()), f"endpoint=127.0.0.1:{port}", f"http://127.0.0.1:{port}"
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir(parents=True)
    conf = folder / "ceph.conf"
    values = {"fsid": fsid, "mon_port": mon_port, "folder": folder}
    conf.write_text(_CONF.format(**values, listen=listen))
    daemons: list[_Daemon] = []

    def daemon(*command: str) -> _Daemon:
        whole = (command[0], "-c", str(conf), *command[1:], "-f")
        daemons.append(_Daemon(whole, folder / f"{command[0]}.out").start())
        return daemons[-1]

    try:
        monmap = ("--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]")
        _run(folder, "monmaptool", *monmap, f"{folder}/monmap")
        _start_cluster(folder, daemon)
        gateway = daemon("radosgw", "-n", "client.rgw")
        server = S3Server(url, ACCESS_KEY, SECRET_KEY, folder)
        user = (
            *("radosgw-admin", "-c", str(conf), "-n", "client.rgw", "user", "create"),
            *("--uid=test", "--display-name=test"),
            *(f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"),
        )
        _until(lambda: bool(_succeeds(folder, *user)), f"a user of radosgw, see {folder}")

        def answers() -> bool:
            gateway.keep_running()
            return is_accepting(port)

        _until(answers, f"radosgw at {url}, see {folder}")
        yield server
    finally:
        for running in reversed(daemons):
            running.kill()


def _start_cluster(folder: Path, daemon: Callable[..., "_Daemon"]) -> None:
    monmap, osd_uuid, given = f"{folder}/monmap", str(uuid.uuid4()), ("-c", f"{folder}/ceph.conf")
    _run(folder, "ceph-mon", *given, "-i", "a", "--mkfs", "--monmap", monmap)
    daemon("ceph-mon", "-i", "a")
    # A young monitor refuses a command now and then (EPERM), also those of a starting daemon,
    # which then ends: both are tried again. Seen with 16.2 on a busy machine, 1 start in 3.
    _until(lambda: bool(_succeeds(folder, "ceph", *given, "osd", "new", osd_uuid)), "ceph-mon")
    mkfs = ("ceph-osd", *given, "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
    _until(lambda: bool(_succeeds(folder, *mkfs)), f"{' '.join(mkfs)}, see {folder}")
    osd = daemon("ceph-osd", "-i", "0")

    def is_up() -> bool:
        osd.keep_running()
        return " 1 up" in (_succeeds(folder, "ceph", *given, "osd", "stat") or "")

    _until(is_up, f"ceph-osd, see {folder}")


class _Daemon(Daemon):
    """Is killed in the end: nothing is kept, and an orderly end takes seconds."""

    starts_left = _STARTS_MAX - 1

    def keep_running(self) -> None:
        """Start it again if it ended by itself; RuntimeError if it has done so too often."""
        if not self.starts_left:
            self.check()
        elif not self.is_running:
            self.starts_left -= 1
            self.start()


def _run(folder: Path, *command: str, bound_s: float = START_S) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=bound_s, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def _succeeds(folder: Path, *command: str) -> str | None:
    """The command's output (never empty), or None if it failed or hung."""
    try:
        return _run(folder, *command, bound_s=_TRY_S) or "done"
    except (RuntimeError, subprocess.TimeoutExpired):
        return None
