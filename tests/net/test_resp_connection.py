"""One connection, read and written directly, against the other end of a socket."""

import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import exceptions

from objkv.net.deadline import EndsBy
from objkv.net.resp import RespConnection, packed
from tests.net.resp_wires import Connection, beside, wire

VALUE = bytes(range(256)) * 20


def read_value(line: RespConnection, buffer: bytearray, told: list[int]) -> int:
    head = line.read_line(len(b"$%d\r\n" % len(buffer)))
    nbytes = int(head[1:])
    with memoryview(buffer) as view:
        line.read_bulk(head, view[:nbytes], told.append)
    return nbytes


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=8), st.integers(0, 400))
def test_a_value_is_read_however_it_is_cut(value: bytes, cuts: list[int], room: int) -> None:
    line, theirs = wire()
    answer = b"$%d\r\n%b\r\n" % (len(value), value)
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(answer[at : at + cut])
        at += cut
    buffer, told = bytearray(max(room, len(value))), list[int]()

    def serve() -> None:
        for piece in [*pieces, answer[at:]]:
            theirs.sendall(piece)

    server = beside(serve)
    nbytes = read_value(line, buffer, told)
    server.join()
    assert buffer[:nbytes] == value
    assert told
    assert told == sorted(set(told))
    assert told[-1] == len(value)
    line._connection.disconnect()
    theirs.close()


def test_a_value_that_does_not_end_where_it_was_announced_is_no_value() -> None:
    line, theirs = wire()
    theirs.sendall(b"$3\r\nabcd\r\n")
    told = list[int]()
    with pytest.raises(exceptions.InvalidResponse):
        read_value(line, bytearray(3), told)
    assert 3 not in told, "a broken value is never reported as complete"


@pytest.mark.parametrize(
    "sent", [b"", b"$5", b"$5\r\n", b"$5\r\nabc", b"$5\r\nabcde", b"$5\r\nabcde\r"]
)
def test_a_connection_that_ends_early_is_lost(sent: bytes) -> None:
    line, theirs = wire()
    theirs.sendall(sent)
    theirs.close()
    told = list[int]()
    with pytest.raises(exceptions.ConnectionError):
        read_value(line, bytearray(5), told)
    assert 5 not in told


@pytest.mark.parametrize("sent", [b"", b"$5", b"$5\r\n", b"$5\r\nabc", b"$5\r\nabcde\r"])
def test_a_server_that_stops_answering_is_waited_for_no_longer_than_told(sent: bytes) -> None:
    line, theirs = wire(timeout_s=0.05)
    theirs.sendall(sent)
    with pytest.raises(exceptions.TimeoutError):
        read_value(line, bytearray(5), [])


def test_a_server_that_stops_reading_is_waited_for_no_longer_than_told() -> None:
    line, _theirs = wire(timeout_s=0.05)
    with pytest.raises(exceptions.TimeoutError):
        line.send(b"head", memoryview(bytes(8 << 20)), b"tail")
    with pytest.raises(exceptions.TimeoutError):
        line.wait_to_receive()


def test_a_wait_for_a_server_that_stops_reading_ends_with_the_call() -> None:
    line, _theirs = wire(timeout_s=5.0)
    while line.offer(memoryview(bytes(1 << 20))):
        pass
    now_s = time.monotonic()
    with EndsBy(now_s + 0.2), pytest.raises(exceptions.TimeoutError):
        line.wait_to_receive()
    assert time.monotonic() - now_s < 5


def test_a_line_without_an_end_is_refused() -> None:
    line, theirs = wire(timeout_s=2.0)
    theirs.sendall(b"-" + bytes(10_000))
    with pytest.raises(exceptions.InvalidResponse):
        line.read_line(5)


def test_parts_arrive_in_order_however_little_is_taken_at_once() -> None:
    line, theirs = wire()
    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    parts = (b"head", memoryview(VALUE * 200), b"", b"tail")
    whole = b"".join(parts)
    received = bytearray()

    def serve() -> None:
        while len(received) < len(whole):
            received.extend(theirs.recv(3_000))

    server = beside(serve)
    line.send(*parts)
    server.join()
    assert received == whole


def test_an_offer_takes_what_there_is_room_for_and_waits_for_nothing() -> None:
    line, theirs = wire()
    view = memoryview(bytes(64 << 20))
    sent = 0
    while taken := line.offer(view[sent:]):
        sent += taken
    assert 0 < sent < len(view)
    theirs.sendall(b"x")
    assert line.wait_to_receive()
    assert line.receive() == b"x"


def test_a_connection_goes_back_with_the_time_out_it_came_with() -> None:
    line, _theirs = wire(timeout_s=7)
    line.end()
    connection = line._connection
    assert isinstance(connection, Connection)
    assert line.pool.released == [connection]
    assert connection._sock.gettimeout() == 7
    assert not connection.disconnected


@pytest.mark.parametrize("spoil", ["half read", "unrequested", "ended"])
def test_a_connection_with_something_left_in_it_goes_back_closed(spoil: str) -> None:
    line, theirs = wire()
    assert line.is_fresh()
    if spoil == "half read":
        line.send(b"x")
    elif spoil == "unrequested":
        theirs.sendall(b"+OK\r\n")
    else:
        theirs.close()
    assert spoil == "half read" or not line.is_fresh()
    line.end()
    assert line._connection.disconnected
    assert line.pool.released == [line._connection]


def test_a_command_is_packed_as_the_protocol_says() -> None:
    assert packed(b"SET", b"k", b"", b"EX", 60) == (
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n$2\r\nEX\r\n$2\r\n60\r\n"
    )


def test_a_connection_from_which_too_much_was_read_is_not_used_again() -> None:
    """Unexpected bytes after a reply would be taken as the next command's reply."""
    line, theirs = wire()
    theirs.sendall(b"$-1\r\n+OK\r\n")
    assert line.read_line(10) == b"$-1"
    assert not line.is_fresh()
    line.end()
    assert line._connection.disconnected
    theirs.close()


def test_a_connection_that_another_thread_closes_is_lost() -> None:
    """As when a client is closed with a call under way."""
    line, theirs = wire()
    line._connection.disconnect()
    with pytest.raises(exceptions.ConnectionError):
        line.wait_to_receive()
    with pytest.raises(exceptions.ConnectionError):
        line.receive()
    with pytest.raises(exceptions.ConnectionError):
        line.offer(memoryview(b"x"))
    line.end()
    theirs.close()
