"""The model server answers as vLLM does, and breaks exactly what it is told to break."""

from __future__ import annotations

import gzip
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from devstack.chat_completions import count_tokens, split_tokens
from devstack.model_server import CHAT_PATH, ModelServer
from devstack.processes import wait_until

CAPTURES = Path(__file__).parent / "captures"
#: seconds for what should happen at once; long, since waiting for it costs nothing when it does
LONG_TIMEOUT_S = 10.0
Chat = Callable[..., requests.Response]
RawExchange = Callable[[int, bytes], tuple[bytes, str]]


def shape_of(value: Any) -> Any:
    """Reduce a JSON value to its keys and types, so that two answers can be compared."""
    if isinstance(value, dict):
        return {name: shape_of(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    return type(value).__name__


def raw_chat(prompt: str, **fields: Any) -> bytes:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}).encode()
    return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (CHAT_PATH.encode(), len(body), body)


def events_of(response: requests.Response) -> list[Any]:
    """Return the events of a stream, parsed, without the closing [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# as vLLM answers


def test_a_completion_has_the_shape_of_the_captured_one(chat: Chat) -> None:
    captured = json.loads((CAPTURES / "vllm-chat-completion.json").read_text())
    assert shape_of(chat().json()) == shape_of(captured)


def test_an_aborted_completion_has_the_shape_of_the_captured_one(chat: Chat, model: ModelServer) -> None:
    model.behave(finish_reason="abort", completion_tokens=3)
    captured = json.loads((CAPTURES / "vllm-aborted-200.json").read_text())
    answer = chat().json()
    assert shape_of(answer) == shape_of(captured)
    assert answer["choices"][0]["finish_reason"] == "abort"


def test_a_streams_events_have_the_shapes_of_the_captured_ones(chat: Chat) -> None:
    text = (CAPTURES / "vllm-chat-completion-stream.sse").read_text()
    captured = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    events = events_of(chat(stream=True, max_tokens=3, stream_options={"include_usage": True}))
    for position in (0, 1, -2, -1):  # the opening, a token, the last token, the usage
        assert shape_of(events[position]) == shape_of(captured[position])


def test_a_stream_has_one_chunk_for_each_completion_token_and_is_the_unstreamed_text(chat: Chat) -> None:
    whole = chat("one two three").json()
    events = events_of(chat("one two three", stream=True, stream_options={"include_usage": True}))
    texts = [event["choices"][0]["delta"]["content"] for event in events if event["choices"]]
    tokens = [text for text in texts if text]
    assert "".join(tokens) == whole["choices"][0]["message"]["content"]
    assert len(tokens) == events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_a_stream_reports_usage_only_when_asked(chat: Chat) -> None:
    assert all("usage" not in event for event in events_of(chat(stream=True)))


@pytest.mark.parametrize("choice_count", [1, 3])
def test_usage_counts_the_tokens_of_every_choice(chat: Chat, choice_count: int) -> None:
    answer = chat("a prompt, of five", n=choice_count).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(texts) == choice_count
    assert answer["usage"]["completion_tokens"] == sum(map(count_tokens, texts))
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_max_tokens_cuts_the_answer_and_says_so(chat: Chat) -> None:
    answer = chat(max_tokens=2).json()
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "length"


def test_tokens_put_together_are_the_text() -> None:
    text = "It's one: “naïve” text, in 3 lines…\nYes?"
    assert "".join(split_tokens(text)) == text


def test_too_long_a_prompt_is_answered_like_the_captured_400(http: requests.Session) -> None:
    captured = json.loads((CAPTURES / "vllm-error-400-context.json").read_text())
    with ModelServer(context_tokens=3) as model:
        body = {"model": "m", "messages": [{"role": "user", "content": "one two three four"}]}
        answer = http.post(model.url + CHAT_PATH, json=body)
    assert answer.status_code == 400
    assert shape_of(answer.json()) == shape_of(captured)


def test_an_unknown_model_is_answered_like_the_captured_404(http: requests.Session) -> None:
    captured = json.loads((CAPTURES / "vllm-error-404-model.json").read_text())
    with ModelServer(model="tiny", only_known_model=True) as model:
        body = {"model": "nope", "messages": [{"role": "user", "content": "x"}]}
        answer = http.post(model.url + CHAT_PATH, json=body)
    assert answer.status_code == 404
    assert answer.json() == captured


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"content": "no role"}]},
        {"max_tokens": 0},
        {"n": "two"},
        {"model": 7},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_a_request_of_the_wrong_form_is_a_400_with_vllms_error_body(chat: Chat, fields: dict[str, Any]) -> None:
    answer = chat(**fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 20_000])
def test_a_body_that_is_no_json_object_is_a_400(http: requests.Session, model: ModelServer, body: bytes) -> None:
    assert http.post(model.url + CHAT_PATH, data=body).status_code == 400


def test_health_is_an_empty_200(http: requests.Session, model: ModelServer) -> None:
    answer = http.get(model.url + "/health")
    assert (answer.status_code, answer.content) == (200, b"")


def read_metric(http: requests.Session, model: ModelServer, name: str) -> float:
    text = http.get(model.url + "/metrics").text
    found = re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in:\n{text}"
    return float(found[1])


def test_metrics_count_the_tokens_that_were_reported(http: requests.Session, model: ModelServer, chat: Chat) -> None:
    usages = [chat(prompt).json()["usage"] for prompt in ("one", "two words", "one")]
    assert read_metric(http, model, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert read_metric(http, model, "generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert read_metric(http, model, "prefix_cache_hits_total") == usages[2]["prompt_tokens"]


def test_metrics_show_who_runs_and_who_waits_for_a_slot(http: requests.Session, raw_exchange: RawExchange) -> None:
    with ModelServer(slots=1) as model:
        model.behave(delay_s=60)
        clients = []
        for prompt in ("first", "second"):
            client = socket.create_connection(("127.0.0.1", model.port))
            client.sendall(raw_chat(prompt))
            clients.append(client)
            model.ledger.wait_for_calls(prompt)
        wait_until(lambda: read_metric(http, model, "num_requests_waiting") == 1, timeout_s=5, what="one waits")
        assert read_metric(http, model, "num_requests_running") == 1
        assert read_metric(http, model, "kv_cache_usage_perc") > 0
        for client in clients:
            client.close()
        for name in ("num_requests_running", "num_requests_waiting"):
            wait_until(lambda name=name: read_metric(http, model, name) == 0, timeout_s=5, what=f"{name} is 0")


def test_models_names_the_model(http: requests.Session, model: ModelServer) -> None:
    assert http.get(model.url + "/v1/models").json()["data"][0]["id"] == model.model


# misbehaviour, byte for byte


def test_reset_sends_nothing_but_a_rst(model: ModelServer, raw_exchange: RawExchange) -> None:
    model.behave(fault="reset")
    assert raw_exchange(model.port, raw_chat("x")) == (b"", "reset")


def test_drop_closes_without_a_byte(model: ModelServer, raw_exchange: RawExchange) -> None:
    model.behave(fault="drop")
    assert raw_exchange(model.port, raw_chat("x")) == (b"", "closed")


def test_cut_off_sends_less_than_the_content_length(model: ModelServer, raw_exchange: RawExchange) -> None:
    model.behave(fault="cut_off")
    received, end = raw_exchange(model.port, raw_chat("x"))
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    assert length is not None
    assert 0 < len(body) < int(length[1])
    assert end == "closed"


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_cut_off_in_chunks_has_no_last_chunk(
    model: ModelServer, raw_exchange: RawExchange, fields: dict[str, Any]
) -> None:
    model.behave(fault="cut_off", chunked=True)
    received, end = raw_exchange(model.port, raw_chat("x", **fields))
    assert b"Transfer-Encoding: chunked" in received
    assert not received.endswith(b"0\r\n\r\n")
    assert end == "closed"


def test_a_stream_is_cut_after_as_many_events_as_told(model: ModelServer, raw_exchange: RawExchange) -> None:
    model.behave(fault="cut_off", after_events=3)
    received, _ = raw_exchange(model.port, raw_chat("one two three", stream=True))
    assert received.count(b"data: ") == 3


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_reset_body_sends_a_part_and_then_a_rst(
    model: ModelServer, raw_exchange: RawExchange, fields: dict[str, Any]
) -> None:
    model.behave(fault="reset_body")
    received, end = raw_exchange(model.port, raw_chat("x", **fields))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert end == "reset"


def test_stall_sends_half_then_nothing_then_the_rest(model: ModelServer, chat: Chat) -> None:
    model.behave(fault="stall", stall_s=0.3)
    begun_at = time.monotonic()
    assert chat().status_code == 200
    assert time.monotonic() - begun_at >= 0.3


def test_trickle_sends_byte_by_byte(model: ModelServer, chat: Chat) -> None:
    model.behave(fault="trickle", trickle_s=0.01, body="0123456789")
    begun_at = time.monotonic()
    assert chat().text == "0123456789"
    assert time.monotonic() - begun_at >= 0.1


def test_delay_comes_before_the_status_line(model: ModelServer, chat: Chat) -> None:
    model.behave(delay_s=0.2)
    assert chat().elapsed.total_seconds() >= 0.2


def test_token_delay_paces_a_stream(model: ModelServer, http: requests.Session) -> None:
    model.behave(token_delay_s=0.02, completion_tokens=10)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    begun_at = time.monotonic()
    with http.post(model.url + CHAT_PATH, json=body, stream=True) as answer:
        arrivals_s = [time.monotonic() - begun_at for line in answer.iter_lines() if line.startswith(b"data: {")]
    assert arrivals_s[-1] >= 0.2
    assert arrivals_s[1] < arrivals_s[-1] / 2


def test_status_body_and_headers_are_sent_as_told(model: ModelServer, chat: Chat) -> None:
    captured = json.loads((CAPTURES / "vllm-error-503-busy.json").read_text())
    model.behave(status=503, body=captured, headers={"Retry-After": "7"})
    answer = chat()
    assert (answer.status_code, answer.json(), answer.headers["Retry-After"]) == (503, captured, "7")


def test_raw_bytes_are_sent_as_they_are(model: ModelServer, raw_exchange: RawExchange) -> None:
    model.behave(fault="raw", raw="SSH-2.0-OpenSSH\r\n\xff")
    assert raw_exchange(model.port, raw_chat("x")) == (b"SSH-2.0-OpenSSH\r\n\xff", "closed")


def test_a_gzip_bomb_is_small_on_the_wire_and_large_unpacked(model: ModelServer, raw_exchange: RawExchange) -> None:
    model.behave(fault="gzip_bomb", bomb_bytes=20_000_000)
    request = raw_chat("x").replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n", 1)
    received, _ = raw_exchange(model.port, request)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in head
    assert len(body) < 100_000
    assert len(gzip.decompress(body)) > 19_000_000


def test_health_is_told_apart_from_the_completions(http: requests.Session, model: ModelServer, chat: Chat) -> None:
    model.behave_health(status=503)
    assert http.get(model.url + "/health").status_code == 503
    assert chat().status_code == 200


def test_a_refusing_server_resets_open_connections_keeps_its_port_and_comes_back(
    http: requests.Session, model: ModelServer
) -> None:
    assert http.get(model.url + "/health").ok
    model.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", model.port), timeout=1)
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", model.port))
    model.start()
    assert http.get(model.url + "/health").ok


def test_ended_idle_connections_are_found_closed_by_their_client(model: ModelServer) -> None:
    with socket.create_connection(("127.0.0.1", model.port), timeout=LONG_TIMEOUT_S) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        model.end_connections()
        assert client.recv(1) == b""


# told over HTTP


def test_a_rule_applies_to_requests_with_its_text_and_as_often_as_told(
    http: requests.Session, model: ModelServer, chat: Chat
) -> None:
    order = {"match": "unlucky", "times": 2, "behaviour": {"status": 418, "body": {"teapot": True}}}
    assert http.put(model.control_url + "/_control", json=order).status_code == 204
    statuses = [chat(prompt).status_code for prompt in ("fine", "unlucky", "unlucky", "unlucky")]
    assert statuses == [200, 418, 418, 200]


def test_control_answers_while_the_model_refuses(http: requests.Session, model: ModelServer) -> None:
    assert http.put(model.control_url + "/_control", json={"listening": False}).status_code == 204

    def refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", model.port)) != 0

    wait_until(refused, timeout_s=LONG_TIMEOUT_S, what="the model refuses")
    assert http.put(model.control_url + "/_control", json={"listening": True}).status_code == 204
    assert http.get(model.url + "/health").ok


@pytest.mark.parametrize(
    "order", [{"behavior": {}}, {"behaviour": {"fault": "explode"}}, {"behaviour": {"delay": 1}}, [], "x"]
)
def test_an_order_that_is_not_understood_is_refused_and_changes_nothing(
    http: requests.Session, model: ModelServer, chat: Chat, order: Any
) -> None:
    assert http.put(model.control_url + "/_control", json=order).status_code == 400
    assert chat().status_code == 200


# the ledger


def test_the_ledger_knows_each_call_by_its_text(http: requests.Session, model: ModelServer, chat: Chat) -> None:
    for prompt in ("once", "twice", "twice"):
        chat(prompt)
    assert [len(model.ledger.calls_for(prompt)) for prompt in ("once", "twice", "never")] == [1, 2, 0]
    documents = http.get(model.control_url + "/_ledger").json()["calls"]
    assert [document["status"] for document in documents] == [200, 200, 200]


def test_the_ledger_keeps_request_id_status_and_tokens(http: requests.Session, model: ModelServer) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    usage = http.post(model.url + CHAT_PATH, json=body, headers={"X-Request-Id": "abc-1"}).json()["usage"]
    (call,) = model.ledger.calls_for("x")
    assert (call.request_id, call.status, call.client_closed_early) == ("abc-1", 200, False)
    assert (call.prompt_tokens, call.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    wait_until(lambda: call.completed, timeout_s=LONG_TIMEOUT_S, what="the call is entered as completed")


def test_the_ledger_says_when_the_client_hung_up(model: ModelServer) -> None:
    model.behave(delay_s=60)
    with socket.create_connection(("127.0.0.1", model.port)) as client:
        client.sendall(raw_chat("impatient"))
        model.ledger.wait_for_calls("impatient")
    call = model.ledger.wait_for_hang_up("impatient")
    assert call.client_closed_early
    assert not call.completed


@pytest.mark.parametrize("fault", ["reset", "drop", "cut_off", "reset_body", "raw"])
def test_a_spoilt_answer_is_never_entered_as_completed(
    model: ModelServer, raw_exchange: RawExchange, fault: str
) -> None:
    model.behave(fault=fault)
    raw_exchange(model.port, raw_chat("x"))
    (call,) = model.ledger.calls_for("x")
    wait_until(lambda: call.answered_at or call.hung_up_at, timeout_s=LONG_TIMEOUT_S, what="the call is over")
    assert not call.completed


# as a process


def test_as_a_process_it_prints_its_urls_and_ends_on_sigterm(http: requests.Session) -> None:
    process = subprocess.Popen([sys.executable, "-m", "devstack.model_server"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        urls = json.loads(process.stdout.readline())
        assert http.get(urls["url"] + "/health").ok
        assert http.get(urls["control_url"] + "/_ledger").json() == {"calls": []}
        process.terminate()
        assert process.wait(LONG_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
