"""One bounded exchange, against a server on a real socket."""

from __future__ import annotations

import gzip
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import pytest
import requests.adapters
from fakes_http import CERTIFICATE, Do, HttpServer, answer
from hypothesis import given, settings
from hypothesis import strategies as st
from timeouts import LONG_TIMEOUT_S, SHORT_TIMEOUT_S

from inference_worker.deadlines import Bounded, Deadlines
from inference_worker.errors import (
    HttpCancelled,
    HttpCutOff,
    HttpError,
    HttpIncomplete,
    HttpTimeout,
    HttpTooLarge,
    HttpUnreachable,
)
from inference_worker.http_client import HttpAnswer, HttpClient

MAX_BYTES = 200_000


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def client(deadlines: Deadlines) -> HttpClient:
    return HttpClient(deadlines, Bounded.MODEL_CALL, max_response_bytes=MAX_BYTES)


def _post(client: HttpClient, server: HttpServer, *, timeout_s: float = LONG_TIMEOUT_S) -> HttpAnswer:
    return client.exchange("POST", f"{server.url}/v1", body=b'{"a":1}', timeout_s=timeout_s)


# -- an ordinary exchange ---------------------------------------------------------------------------------------------


def test_method_path_headers_and_body_go_out_as_they_are_given(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b'{"b":2}', status="201 Created", headers={"X-Mixed-Case": "Kept"}))
    body = b'{"a": 1.0, "b": "\xc3\xa9"}\n'
    got = client.exchange("POST", f"{server.url}/v1/x?y=1", headers={"X-Id": b"a-1"}, body=body, timeout_s=5.0)
    assert (got.status_code, got.body, got.is_length_known) == (201, b'{"b":2}', True)
    assert got.headers["x-mixed-case"] == "Kept"
    (request,) = server.requests
    assert (request.method, request.target, request.body) == ("POST", "/v1/x?y=1", body)
    assert request.headers["x-id"] == "a-1"


def test_get_has_no_body(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b""))
    assert client.exchange("GET", f"{server.url}/health", timeout_s=5.0).status_code == 200
    assert "content-length" not in server.requests[0].headers


def test_second_request_reuses_the_connection(client: HttpClient, server: HttpServer) -> None:
    for _ in range(3):
        server.reply(answer())
        _post(client, server)
    assert server.connection_count == 1


def test_threads_do_not_share_connections(client: HttpClient, server: HttpServer) -> None:
    hold = threading.Event()
    server.reply(hold, answer())
    server.reply(hold, answer())
    threads = [threading.Thread(target=_post, args=(client, server)) for _ in range(2)]
    for thread in threads:
        thread.start()
    server.wait_for(lambda it: len(it.requests) == 2)
    hold.set()
    for thread in threads:
        thread.join(LONG_TIMEOUT_S)
    assert {request.connection for request in server.requests} == {0, 1}


def test_end_of_one_threads_time_leaves_the_others_alone(client: HttpClient, server: HttpServer) -> None:
    hold = threading.Event()
    server.reply(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", Do.TRICKLE)
    server.reply(hold, answer(b'{"other":1}'))
    late: list[type] = []
    bodies: list[bytes] = []

    def run_out_of_time() -> None:
        try:
            _post(client, server, timeout_s=SHORT_TIMEOUT_S)
        except HttpError as err:
            late.append(type(err))

    threads = [
        threading.Thread(target=run_out_of_time),
        threading.Thread(target=lambda: bodies.append(_post(client, server).body)),
    ]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        server.wait_for(lambda it, number=number: len(it.requests) == number)
    threads[0].join(LONG_TIMEOUT_S)
    hold.set()
    threads[1].join(LONG_TIMEOUT_S)
    assert (late, bodies) == ([HttpTimeout], [b'{"other":1}'])


def test_cookies_are_not_sent_back(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(headers={"Set-Cookie": "replica=7; Path=/"}))
    server.reply(answer())
    _post(client, server)
    _post(client, server)
    assert "cookie" not in server.requests[1].headers


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent"])
def test_redirects_are_answers_and_not_followed(client: HttpClient, server: HttpServer, status: str) -> None:
    server.reply(answer(b"moved", status=status, headers={"Location": f"{server.url}/elsewhere"}))
    got = _post(client, server)
    assert (got.status_code, got.body) == (int(status[:3]), b"moved")
    assert len(server.requests) == 1


def test_redirect_to_nonsense_is_an_answer(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b"", status="302 Found", headers={"Location": "http://[nonsense"}))
    assert _post(client, server).status_code == 302


def test_redirect_has_the_size_cap_of_any_answer(client: HttpClient, server: HttpServer) -> None:
    bomb = gzip.compress(b" " * 50 * MAX_BYTES)
    headers = {"Location": "/elsewhere", "Content-Encoding": "gzip"}
    server.reply(answer(bomb, status="302 Found", headers=headers))
    with pytest.raises(HttpTooLarge):
        _post(client, server)


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_r43_answer_that_has_no_body_is_whole(client: HttpClient, server: HttpServer, status: str) -> None:
    server.reply(f"HTTP/1.1 {status}\r\n\r\n".encode())
    got = _post(client, server)
    assert (got.status_code, got.body, got.is_length_known) == (int(status[:3]), b"", True)


def test_chunked_answer_is_joined(client: HttpClient, server: HttpServer) -> None:
    server.reply(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n1\r\n \r\n0\r\n\r\n")
    got = _post(client, server)
    assert (got.body, got.is_length_known) == (b"{} ", True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_answer_is_decompressed(client: HttpClient, server: HttpServer, encoding: str) -> None:
    body = gzip.compress(b'{"a":1}') if encoding == "gzip" else zlib.compress(b'{"a":1}')
    server.reply(answer(body, headers={"Content-Encoding": encoding}))
    assert _post(client, server).body == b'{"a":1}'


# -- R38: a kept-alive connection that the server closed --------------------------------------------------------------


def test_r38_connection_closed_while_idle_is_replaced(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(), Do.CLOSE)
    server.reply(answer(b'{"second":1}'))
    _post(client, server)
    server.wait_for(lambda it: it.ended_count == 1)
    assert _post(client, server).body == b'{"second":1}'
    assert [request.connection for request in server.requests] == [0, 1]


@pytest.mark.parametrize("how", [Do.CLOSE, Do.RESET])
def test_r38_reused_connection_closed_as_the_request_arrives_is_tried_once_more(
    client: HttpClient, server: HttpServer, how: Do
) -> None:
    server.reply(answer())
    server.reply(how)
    server.reply(answer(b'{"again":1}'))
    _post(client, server)
    assert _post(client, server).body == b'{"again":1}'
    assert [request.connection for request in server.requests] == [0, 0, 1]


@pytest.mark.parametrize("how", [Do.CLOSE, Do.RESET])
def test_r38_fresh_connection_closed_as_the_request_arrives_is_a_failed_attempt(
    client: HttpClient, server: HttpServer, how: Do
) -> None:
    server.reply(how)
    with pytest.raises(HttpUnreachable):
        _post(client, server)
    assert len(server.requests) == 1


def test_r38_second_try_is_the_last(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer())
    _post(client, server)
    server.reply(Do.CLOSE)
    server.reply(Do.CLOSE)
    with pytest.raises(HttpUnreachable):
        _post(client, server)
    assert len(server.requests) == 3


def test_r38_reused_connection_closed_in_the_middle_of_an_answer_is_not_tried_again(
    client: HttpClient, server: HttpServer
) -> None:
    server.reply(answer())
    _post(client, server)
    server.reply(b"HTTP/1.1 200 OK\r\nContent-Le", Do.CLOSE)
    with pytest.raises(HttpIncomplete):
        _post(client, server)
    assert len(server.requests) == 2


def test_r38_holds_for_tls_where_the_connection_is_made_before_the_request(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests.adapters, "DEFAULT_CA_BUNDLE_PATH", str(CERTIFICATE))
    server = HttpServer(tls=True)
    try:
        server.reply(Do.CLOSE)
        with pytest.raises(HttpUnreachable):
            _post(client, server)
        assert len(server.requests) == 1
        server.reply(answer())
        server.reply(Do.CLOSE)
        server.reply(answer(b'{"again":1}'))
        _post(client, server)
        assert _post(client, server).body == b'{"again":1}'
        assert [request.connection for request in server.requests] == [0, 1, 1, 2]
    finally:
        server.stop()


# -- R39: nothing of the environment ----------------------------------------------------------------------------------


@pytest.mark.parametrize("no_proxy", [None, "localhost"])
def test_r39_proxy_variables_are_ignored(
    client: HttpClient, server: HttpServer, monkeypatch: pytest.MonkeyPatch, closed_port: int, no_proxy: str | None
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
        monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{closed_port}")
    if no_proxy:
        monkeypatch.setenv("NO_PROXY", no_proxy)
    server.reply(answer())
    assert _post(client, server).status_code == 200
    assert server.requests[0].target == "/v1"


@pytest.mark.parametrize("token", ["Bearer ours", None])
def test_r39_netrc_neither_adds_nor_replaces_credentials(
    client: HttpClient, server: HttpServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login theirs password theirs\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    server.reply(answer())
    headers = {"Authorization": token} if token else {}
    client.exchange("GET", server.url, headers=headers, timeout_s=5.0)
    assert server.requests[0].headers.get("authorization") == token


# -- no answer --------------------------------------------------------------------------------------------------------


def test_refused_connection_is_unreachable(client: HttpClient, closed_port: int) -> None:
    with pytest.raises(HttpUnreachable, match="connection refused"):
        client.exchange("GET", f"http://127.0.0.1:{closed_port}/", timeout_s=5.0)


def test_unknown_host_is_unreachable(client: HttpClient) -> None:
    with pytest.raises(HttpUnreachable, match="unknown host"):
        client.exchange("GET", "http://no-such-host.invalid/", timeout_s=5.0)


@pytest.mark.parametrize(
    "url", ["http://*/", "http://.a/", f"http://{'a' * 64}.invalid/", "http://[::1", "http://a:b/"]
)
def test_url_that_no_library_takes_is_unreachable(client: HttpClient, url: str) -> None:
    with pytest.raises(HttpError):
        client.exchange("GET", url, timeout_s=5.0)


def test_error_tells_neither_the_url_nor_a_header(client: HttpClient, closed_port: int) -> None:
    url = f"http://user:S3cretA@127.0.0.1:{closed_port}/"
    with pytest.raises(HttpUnreachable) as caught:
        client.exchange("GET", url, headers={"Authorization": "Bearer S3cretB"}, timeout_s=5.0)
    assert "S3cret" not in str(caught.value)
    with pytest.raises(HttpUnreachable) as caught:
        client.exchange("GET", url, headers={"Authorization": "Bearer S3cretB\n"}, timeout_s=5.0)
    assert "S3cret" not in str(caught.value)


@pytest.mark.parametrize("said", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01\x00\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_no_http_is_incomplete(client: HttpClient, server: HttpServer, said: bytes) -> None:
    server.reply(said, Do.CLOSE)
    with pytest.raises(HttpIncomplete):
        _post(client, server)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n" + b'{"choices":[{}',
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: applica",
        b"HTTP/1",
    ],
    ids=["shorter than its length", "no last chunk", "half a chunk", "bad chunk size", "half a header", "half a line"],
)
@pytest.mark.parametrize("how", [Do.CLOSE, Do.RESET])
def test_r41_answer_that_begins_and_is_not_whole_is_incomplete(
    client: HttpClient, server: HttpServer, said: bytes, how: Do
) -> None:
    # a reset may overtake the bytes before it, and then nothing of an answer has come
    expected = HttpIncomplete if how is Do.CLOSE else (HttpIncomplete, HttpUnreachable)
    server.reply(said, how)
    with pytest.raises(expected):
        _post(client, server)


def test_r41_body_that_ends_with_the_connection_is_told_apart(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b'{"choices":[{"mes', length=False, headers={"Connection": "close"}), Do.CLOSE)
    got = _post(client, server)
    assert (got.body, got.is_length_known) == (b'{"choices":[{"mes', False)


def test_r41_a_length_that_is_no_number_tells_nothing_of_the_end(client: HttpClient, server: HttpServer) -> None:
    server.reply(b'HTTP/1.1 200 OK\r\nContent-Length: 2x\r\n\r\n{"choices":[{"mes', Do.CLOSE)
    got = _post(client, server)
    assert (got.body, got.is_length_known) == (b'{"choices":[{"mes', False)


def test_body_that_cannot_be_decompressed_is_incomplete(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b"no gzip at all", headers={"Content-Encoding": "gzip"}))
    with pytest.raises(HttpIncomplete):
        _post(client, server)


# -- too large --------------------------------------------------------------------------------------------------------


def test_answer_of_exactly_the_cap_is_taken(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b"x" * MAX_BYTES))
    assert len(_post(client, server).body) == MAX_BYTES


def test_answer_longer_than_the_cap_is_too_large(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b"x" * (MAX_BYTES + 1)))
    with pytest.raises(HttpTooLarge):
        _post(client, server)


def test_endless_answer_is_given_up_at_the_cap(client: HttpClient, server: HttpServer) -> None:
    server.reply(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 65_536] * 8, Do.STALL)
    with pytest.raises(HttpTooLarge):
        _post(client, server)
    server.wait_for(lambda it: it.ended_count == 1)


def test_gzip_bomb_is_too_large(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(gzip.compress(b"\0" * 100 * MAX_BYTES), headers={"Content-Encoding": "gzip"}))
    with pytest.raises(HttpTooLarge):
        _post(client, server)


def test_next_request_after_one_too_large_is_served(client: HttpClient, server: HttpServer) -> None:
    server.reply(answer(b"x" * 3 * MAX_BYTES))
    server.reply(answer(b'{"next":1}'))
    with pytest.raises(HttpTooLarge):
        _post(client, server)
    assert _post(client, server).body == b'{"next":1}'


# -- the bound on the whole exchange ----------------------------------------------------------------------------------

STALLS = pytest.mark.parametrize(
    "said",
    [
        (Do.STALL,),
        (b"HTTP/1.1 200 OK\r\nContent-", Do.STALL),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", Do.STALL),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", Do.STALL),
        (b"HTTP/1.1 200 OK\r\n\r\n{", Do.STALL),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", Do.TRICKLE),
        (b"HTTP/1.1 200 OK\r\nX-Long: ", Do.TRICKLE),
    ],
    ids=[
        "before the headers",
        "in the headers",
        "in the body",
        "in a chunked body",
        "in a body without length",
        "trickling body",
        "trickling headers",
    ],
)


@STALLS
def test_r40_r53_exchange_ends_at_its_bound_wherever_it_stalls(
    client: HttpClient, server: HttpServer, said: tuple[bytes | Do, ...]
) -> None:
    server.reply(*said)
    began_at = monotonic()
    with pytest.raises(HttpTimeout):
        _post(client, server, timeout_s=SHORT_TIMEOUT_S)
    assert SHORT_TIMEOUT_S - 0.05 <= monotonic() - began_at < SHORT_TIMEOUT_S + 1.0
    # the generation behind it ends only when its socket is closed
    server.wait_for(lambda it: it.ended_count == 1)


@STALLS
def test_exchange_is_cut_off_from_another_thread_within_a_second(
    client: HttpClient, deadlines: Deadlines, server: HttpServer, said: tuple[bytes | Do, ...]
) -> None:
    server.reply(*said)

    def cut() -> None:
        server.wait_for(lambda it: it.stalled_count == 1)
        deadlines.end(Bounded.MODEL_CALL)

    cutter = threading.Thread(target=cut)
    began_at = monotonic()
    cutter.start()
    with pytest.raises(HttpCutOff):
        _post(client, server)
    assert monotonic() - began_at < 1.0
    cutter.join(LONG_TIMEOUT_S)
    server.wait_for(lambda it: it.ended_count == 1)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port whose queue of connections is full: a connect to it waits."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, ExitStack() as waiting:
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        yield listening.getsockname()[1]


def test_exchange_that_still_connects_is_cut_off_within_a_second(
    client: HttpClient, deadlines: Deadlines, silent_port: int
) -> None:
    cutter = threading.Timer(SHORT_TIMEOUT_S, deadlines.end, [Bounded.MODEL_CALL])
    began_at = monotonic()
    cutter.start()
    with pytest.raises(HttpCutOff):
        client.exchange("POST", f"http://127.0.0.1:{silent_port}/v1", timeout_s=LONG_TIMEOUT_S)
    assert monotonic() - began_at < SHORT_TIMEOUT_S + 1.0
    cutter.join()


def test_connect_that_takes_too_long_is_unreachable(client: HttpClient, silent_port: int) -> None:
    with pytest.raises(HttpUnreachable, match="no connection in time"):
        client.exchange("POST", f"http://127.0.0.1:{silent_port}/v1", timeout_s=SHORT_TIMEOUT_S)


@STALLS
def test_exchange_is_cancelled_by_its_name_and_the_next_one_on_this_thread_is_not(
    client: HttpClient, deadlines: Deadlines, server: HttpServer, said: tuple[bytes | Do, ...]
) -> None:
    server.reply(*said)

    def cancel() -> None:
        server.wait_for(lambda it: it.stalled_count == 1)
        deadlines.cancel({"r-1"})

    canceller = threading.Thread(target=cancel)
    began_at = monotonic()
    canceller.start()
    with pytest.raises(HttpCancelled):
        client.exchange("POST", f"{server.url}/v1", timeout_s=LONG_TIMEOUT_S, name="r-1")
    assert monotonic() - began_at < 1.0
    canceller.join(LONG_TIMEOUT_S)
    server.wait_for(lambda it: it.ended_count == 1)
    server.reply(answer())
    assert _post(client, server).status_code == 200


def test_no_exchange_begins_after_the_end(client: HttpClient, deadlines: Deadlines, server: HttpServer) -> None:
    deadlines.end(Bounded.MODEL_CALL)
    with pytest.raises(HttpCutOff):
        _post(client, server)
    assert server.requests == []


def test_ending_one_kind_of_call_leaves_the_other_alone(deadlines: Deadlines, server: HttpServer) -> None:
    side = HttpClient(deadlines, Bounded.SIDE_CALL, max_response_bytes=MAX_BYTES)
    deadlines.end(Bounded.MODEL_CALL)
    server.reply(answer())
    assert _post(side, server).status_code == 200


def test_connection_is_fresh_after_a_timeout(client: HttpClient, server: HttpServer) -> None:
    server.reply(Do.STALL)
    server.reply(answer(b'{"next":1}'))
    with pytest.raises(HttpTimeout):
        _post(client, server, timeout_s=SHORT_TIMEOUT_S)
    assert _post(client, server).body == b'{"next":1}'
    assert [request.connection for request in server.requests] == [0, 1]


# -- whatever a peer says ---------------------------------------------------------------------------------------------


def _mutations(whole: bytes) -> st.SearchStrategy[bytes]:
    def mutate(edits: list[tuple[int, int]]) -> bytes:
        mutable = bytearray(whole)
        for at, value in edits:
            mutable[at % len(mutable)] = value
        return bytes(mutable)

    edits = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6)
    return st.one_of(edits.map(mutate), st.integers(0, len(whole)).map(lambda length: whole[:length]))


@settings(max_examples=150)
@given(data=st.data())
def test_only_our_own_errors_come_out_whatever_a_peer_says(data: st.DataObject) -> None:
    whole = data.draw(
        st.sampled_from(
            [
                answer(b'{"a":1}', headers={"Content-Type": "application/json"}),
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{} \r\n0\r\n\r\n",
                answer(gzip.compress(b'{"a":1}'), headers={"Content-Encoding": "gzip"}),
                answer(b"", status="302 Found", headers={"Location": "http://127.0.0.1:1/x", "Set-Cookie": "a=b"}),
            ]
        )
    )
    said = data.draw(_mutations(whole))
    server, client = HttpServer(), HttpClient(Deadlines(), Bounded.MODEL_CALL, max_response_bytes=1000)
    try:
        server.reply(said, Do.CLOSE)
        got = client.exchange("GET", server.url, timeout_s=LONG_TIMEOUT_S)
    except HttpError:
        return
    finally:
        server.stop()
    assert isinstance(got.body, bytes)
    assert len(got.body) <= 1000
