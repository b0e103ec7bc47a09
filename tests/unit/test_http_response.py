"""The head of an answer, whatever a server writes there; the body stays http.client's to read."""

from __future__ import annotations

import socket
from http.client import BadStatusLine, HTTPException, IncompleteRead, RemoteDisconnected

import pytest

from inference_worker.http_response import Response


def _read(said: bytes, *, method: str = "POST") -> tuple[Response, bytes]:
    """Have a response read what a server said before it closed; the head, and the body."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        theirs.close()
        response = Response(ours, method=method)
        response.begin()
        return response, response.read()


def test_names_are_in_lower_case_and_values_without_the_white_space_around_them() -> None:
    response, body = _read(b"HTTP/1.1 200 OK\r\nContent-Length: 2 \r\nX-Mixed-Case:\t a b\xe9 \r\n\r\n{}")
    assert response.fields == {"content-length": "2", "x-mixed-case": "a b\xe9"}
    assert (response.status, response.will_close, body) == (200, False, b"{}")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"HTTP/1.1 200 OK\r\n", 200),
        (b"HTTP/1.1 204\r\n", 204),
        (b"HTTP/1.1 503 \r\n", 503),
        (b"HTTP/1.0 200 OK\n", 200),
        (b"HTTP/1.1 422 Unprocessable \xe9 Entity\r\n", 422),
    ],
)
def test_status_with_or_without_a_reason(line: bytes, status: int) -> None:
    assert _read(line + b"\r\n")[0].status == status


@pytest.mark.parametrize(
    "line", [b"HTTP/1.1 abc\r\n", b"HTTP/1.1 20\r\n", b"HTTP/1.1 2000\r\n", b"HTTP/2 200\r\n", b"<html>\r\n", b"\r\n"]
)
def test_what_is_no_status_line_is_no_answer(line: bytes) -> None:
    with pytest.raises(BadStatusLine):
        _read(line + b"\r\n")


def test_nothing_at_all_is_told_from_an_answer_cut_off() -> None:
    with pytest.raises(RemoteDisconnected):
        _read(b"")


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"


@pytest.mark.parametrize("length", range(len(b"HTTP/1.1 200 OK\r\n"), len(WHOLE) - 1))
def test_r41_a_head_that_stops_short_is_cut_off(length: int) -> None:
    with pytest.raises(IncompleteRead):
        _read(WHOLE[:length])


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
def test_the_answer_follows_what_is_said_in_the_interim(interim: bytes) -> None:
    early = b"HTTP/1.1 " + interim + b"\r\nLink: </x>\r\nContent-Length: 9\r\n\r\n"
    response, body = _read(early + early + WHOLE + b"{}")
    assert (response.status, response.fields, body) == (200, {"content-length": "2"}, b"{}")


def test_a_field_that_comes_twice_is_joined_and_a_folded_one_is_one() -> None:
    response, _ = _read(b"HTTP/1.1 200 OK\r\nVia: a\r\nX-Long: b\r\n  c\r\nvia: d\r\n\r\n")
    assert response.fields == {"via": "a, d", "x-long": "b c"}


def test_the_same_length_twice_is_one() -> None:
    assert _read(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}more")[1] == b"{}"


def test_a_line_that_is_no_field_costs_no_answer() -> None:
    response, body = _read(b"HTTP/1.1 200 OK\r\nno field\r\nContent-Length: 2\r\n\r\n{}")
    assert (response.fields, body) == ({"content-length": "2"}, b"{}")


@pytest.mark.parametrize("length", ["-2", "2x", "+2", "1_0", "", "9" * 5000])
def test_a_length_that_is_none_leaves_the_end_to_the_connection(length: str) -> None:
    response, body = _read(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nabc".encode())
    assert (response.length, response.will_close, body) == (None, True, b"abc")


def test_a_chunked_body_is_chunked_whatever_length_is_named() -> None:
    chunked = b"2\r\n{}\r\n0\r\n\r\n"
    response, body = _read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nContent-Length: 99\r\n\r\n" + chunked)
    assert (response.will_close, body) == (False, b"{}")


@pytest.mark.parametrize(
    ("said", "will_close"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive\r\n", False),
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n", False),
        (b"HTTP/1.1 101 Switching Protocols\r\n", False),
    ],
)
def test_whether_the_connection_is_kept(said: bytes, will_close: bool) -> None:
    assert _read(said + b"\r\n")[0].will_close is will_close


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_these_have_no_body_whatever_length_is_named(status: str) -> None:
    assert _read(f"HTTP/1.1 {status}\r\nContent-Length: 5\r\n\r\n".encode())[1] == b""


def test_the_answer_to_head_has_no_body() -> None:
    assert _read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", method="HEAD")[1] == b""


@pytest.mark.parametrize(
    "fields", [b"X: " + b"a" * 70_000 + b"\r\n", b"X: a\r\n" * 101], ids=["a line too long", "too many"]
)
def test_a_head_without_bounds_is_given_up(fields: bytes) -> None:
    with pytest.raises(HTTPException):
        _read(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n")
