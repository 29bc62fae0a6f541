import mmap
import os
from collections.abc import Callable
from contextlib import closing, suppress

import pytest

from objkv.agent.memory.answers import AnswerBoard
from objkv.agent.memory.arena import BOARD_BYTES, PAGE, Arena, CellState, PagesAhead, Progress
from objkv.agent.outbox import ClientOutbox
from objkv.errors import ConfigError, TransferError
from tests.support.waiting import wait_until


def test_only_the_agent_can_write_and_nobody_can_resize() -> None:
    arena = Arena.create(8 * PAGE)
    mine = Arena.join(os.dup(arena.fd))
    arena.view[BOARD_BYTES] = 7
    assert mine.view[BOARD_BYTES] == 7
    assert mine.view.readonly
    with pytest.raises(PermissionError):
        mmap.mmap(mine.fd, mine.nbytes)
    for nbytes in (PAGE, 2 * arena.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(mine.fd, nbytes)
    mine.close()
    mine.close()
    assert arena.view[BOARD_BYTES] == 7
    arena.close()


@pytest.mark.parametrize("join", [Arena.join, AnswerBoard.join, ClientOutbox])
def test_a_file_that_could_shrink_is_refused_and_closed_as_is_what_is_no_memfd(
    join: Callable[[int], object],
) -> None:
    soft, null = os.memfd_create("x", os.MFD_ALLOW_SEALING), os.open(os.devnull, os.O_RDONLY)
    os.ftruncate(soft, BOARD_BYTES + PAGE)
    for fd, reason in ((soft, "not sealed"), (null, "no memfd")):
        with pytest.raises(TransferError, match=reason):
            join(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_pages_come_before_payloads_need_them_and_keep_what_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("objkv.agent.memory.arena.AHEAD_BYTES", (4 * PAGE, 8 * PAGE))
    arena = Arena.create(64 * PAGE)

    def made() -> int:
        return os.fstat(arena.fd).st_blocks * 512 // PAGE

    ahead = PagesAhead(arena)
    wait_until(lambda: made() == 4)
    arena.view[BOARD_BYTES : BOARD_BYTES + 7 * PAGE] = bytes([9]) * (7 * PAGE)
    ahead.used(BOARD_BYTES + 5 * PAGE + 1)
    wait_until(lambda: made() == 12)  # as many again as are used
    ahead.used(BOARD_BYTES + 3 * PAGE)
    ahead.used(BOARD_BYTES + 32 * PAGE)
    wait_until(lambda: made() == 7 + 5 + 8)  # the used ones come when they are written
    assert bytes(arena.view[BOARD_BYTES : BOARD_BYTES + 8 * PAGE]) == bytes([9]) * (
        7 * PAGE
    ) + bytes(PAGE)
    ahead.used(arena.nbytes)
    ahead.close()
    ahead.close()
    arena.close()


def test_on_an_older_system_pages_come_when_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("objkv.agent.memory.arena.map_pages", lambda start, nbytes: False)
    with closing(Arena.create(64 * PAGE)) as arena:
        ahead = PagesAhead(arena)
        ahead.used(BOARD_BYTES + 32 * PAGE)
        ahead.close()
        assert os.fstat(arena.fd).st_blocks == 0


@pytest.mark.parametrize("nbytes", [PAGE - 1, 1 << 62, 1 << 70])
def test_an_arena_of_a_size_that_there_is_not_is_a_wrong_setting(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="agent_memory_bytes"):
        Arena.create(nbytes)


def test_an_arena_that_is_closed_is_unmapped_with_its_last_part() -> None:
    arena = Arena.create(PAGE)
    inode = os.fstat(arena.fd).st_ino
    part = arena.view[-PAGE:]
    arena.close()
    assert part[0] == 0
    assert inode in inodes()
    part.release()
    assert inode not in inodes()
    arena.close()
    arena.board.write(0, Progress(CellState.FAILED, 0, 0, 0, 0))  # by a thread that is late


def inodes() -> set[int]:
    """Of the files that this process has open or mapped."""
    found = set[int]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            found.add(os.fstat(int(number)).st_ino)
    return found


def test_two_threads_that_close_an_arena_close_its_descriptor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena, closed = Arena.create(8 * PAGE), list[int]()

    def close(fd: int) -> None:
        """Python lets other threads run here."""
        closed.append(fd)
        if len(closed) < 3:
            arena.close()

    fd = arena.fd
    monkeypatch.setattr("objkv.agent.memory.arena.os.close", close)
    arena.close()
    monkeypatch.undo()
    os.close(fd)
    assert closed == [fd]
