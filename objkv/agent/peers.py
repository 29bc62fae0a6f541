"""Who is at the other end of a Unix socket. Both sides of an agent's sockets look."""

import errno
import os
import socket
import stat
import struct
from pathlib import Path

_PEER = struct.Struct("3i")
_ROOT = 0


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return process (0: in another container) and user at the other end. Raises ``OSError``."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_served(uid: int) -> bool:
    """Whether an agent of this user serves processes of the user ``uid``."""
    return uid in (os.geteuid(), _ROOT)


def connect_to(sock: socket.socket, path: Path) -> None:
    """Connect to the agent at ``path``. Raises ``OSError``, also if it may be an impostor: an agent
    is of this user, of root, or of the owner of a folder that no other user can write."""
    sock.connect(str(path))
    _, uid = peer_of(sock)
    if is_served(uid):
        return
    folder = path.parent.stat()
    if uid != folder.st_uid or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"user {uid} serves it, and others can write its folder")


def bind_private(sock: socket.socket, path: str) -> None:
    """Bind a Unix socket to which only this user can connect. Not by the umask, which files and
    folders of other threads would get, too. Raises ``OSError``."""
    os.fchmod(sock.fileno(), 0o600)
    sock.bind(path)
