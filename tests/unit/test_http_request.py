"""The head of a request, as http.server reads it."""

from __future__ import annotations

import io
from http.server import BaseHTTPRequestHandler

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_worker.http_request import request_head, request_start

START = request_start("POST", "/v1/chat?a=b%20c", "model:8000")


class _Reader(BaseHTTPRequestHandler):
    """The standard library's server side, without a socket."""

    def __init__(self, head: bytes) -> None:
        self.rfile = io.BytesIO(head)
        self.raw_requestline = self.rfile.readline()
        assert self.parse_request()


def _read(head: bytes) -> _Reader:
    return _Reader(head)


def test_a_server_reads_what_was_meant() -> None:
    request = _read(request_head(START, {"Accept": "text/plain", "X-Id": b"\xc3\xa9"}, b"12345"))
    assert (request.command, request.path, request.request_version) == ("POST", "/v1/chat?a=b%20c", "HTTP/1.1")
    assert request.headers["Host"] == "model:8000"
    assert request.headers["Accept"] == "text/plain"
    assert request.headers["X-Id"].encode("latin-1") == b"\xc3\xa9"
    assert request.headers["Content-Length"] == "5"
    assert request.headers["Accept-Encoding"] == "identity"


def test_without_a_body_there_is_no_length_and_an_empty_one_has_one() -> None:
    assert "Content-Length" not in _read(request_head(START, {}, None)).headers
    assert _read(request_head(START, {}, b"")).headers["Content-Length"] == "0"


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_no_value_begins_a_header_or_a_request_of_its_own(value: bytes | str) -> None:
    try:
        head = request_head(START, {"X-Id": value}, b"12345")
    except ValueError:
        return
    assert head.count(b"\n") == START.count(b"\n") + 3
    assert _read(head).headers["Content-Length"] == "5"


@pytest.mark.parametrize("value", ["a\nb", "a\r\nb", b"a\rb", "a\0b", "snowman \N{SNOWMAN}"])
def test_a_value_that_cannot_be_sent_is_refused(value: bytes | str) -> None:
    with pytest.raises(ValueError):
        request_head(START, {"X-Id": value}, None)
