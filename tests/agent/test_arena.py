import mmap
import os
from contextlib import closing, suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from objkv.agent.memory.answers import AnswerBoard
from objkv.agent.memory.arena import (
    BOARD_BYTES,
    PAGE,
    Arena,
    CellState,
    Extents,
    PagesAhead,
    Progress,
)
from objkv.errors import ConfigError, TransferError
from tests.agent.consistency import covers_once
from tests.support.waiting import wait_until

PAGES = 24


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


@pytest.mark.parametrize("kind", [Arena, AnswerBoard])
def test_a_file_that_could_shrink_is_refused_and_closed_as_is_what_is_no_memfd(
    kind: type[Arena] | type[AnswerBoard],
) -> None:
    soft, null = os.memfd_create("x", os.MFD_ALLOW_SEALING), os.open(os.devnull, os.O_RDONLY)
    os.ftruncate(soft, BOARD_BYTES + PAGE)
    for fd, reason in ((soft, "not sealed"), (null, "no memfd")):
        with pytest.raises(TransferError, match=reason):
            kind.join(fd)
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
    ahead.used(BOARD_BYTES + 6 * PAGE)
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


class ExtentsMachine(RuleBasedStateMachine):
    """Extents against a list of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(PAGE, (PAGES + 1) * PAGE)
        self.pages: list[int | None] = [None] * PAGES
        self.taken: dict[int, int] = {}

    def gaps(self) -> list[int]:
        text = "".join(".#"[page is not None] for page in self.pages)
        return [len(gap) for gap in text.split("#") if gap]

    @rule(nbytes=st.integers(1, PAGES * PAGE // 2))
    def take(self, nbytes: int) -> None:
        count, gaps = -(-nbytes // PAGE), self.gaps()
        start = self.extents.allocate(nbytes)
        fitting = [gap for gap in gaps if gap >= count]
        assert (start is None) == (not fitting)
        if start is None:
            return
        first = start // PAGE - 1
        assert self.pages[first : first + count] == [None] * count
        self.pages[first : first + count] = [start] * count
        self.taken[start] = count
        left = sorted(gaps)
        left.remove(min(fitting))
        if min(fitting) > count:
            left.append(min(fitting) - count)
        assert sorted(self.gaps()) == sorted(left)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.taken:
            start = data.draw(st.sampled_from(sorted(self.taken)))
            self.extents.free(start)
            del self.taken[start]
            self.pages = [None if page == start else page for page in self.pages]

    @rule(data=st.data(), count=st.integers(1, PAGES))
    def windows(self, data: st.DataObject, count: int) -> None:
        movable = data.draw(st.sets(st.sampled_from(sorted(self.taken)))) if self.taken else set()
        sizes = {start: self.taken[start] * PAGE for start in movable}
        found = list(self.extents.evictable_spans(count * PAGE, sizes))
        free = [page is None or page in movable for page in self.pages]
        exists = any(all(free[at : at + count]) for at in range(PAGES - count + 1))
        assert bool(found) == exists
        for used, starts in found:
            assert set(starts) <= movable
            assert used == sum(self.taken[start] * PAGE for start in starts)
            left = [None if page in starts else page for page in self.pages]
            runs = "".join(".#"[page is not None] for page in left).split("#")
            assert max(map(len, runs)) >= count

    @invariant()
    def adds_up(self) -> None:
        assert covers_once(self.extents)
        assert self.extents.free_bytes == PAGE * self.pages.count(None)


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
