"""Small parts of the benchmark that a wrong figure would hide in."""

from __future__ import annotations

import json
import os
import time

import pytest

from benchmarks import messages, process_usage
from benchmarks.figures import FIGURES
from benchmarks.requirements import REQUIREMENTS, missing_requirements
from benchmarks.run import _NAMES, read_arguments
from benchmarks.servers import answers
from benchmarks.servers.instant_http import content_length
from benchmarks.servers.raw_client import answer_length
from inference_worker.messages import decode_request


@pytest.mark.parametrize("size_bytes", [300, 100_000])
def test_an_answer_has_the_wanted_size_and_counts_that_can_be_billed(size_bytes: int) -> None:
    body = answers.completion(size_bytes)
    assert abs(len(body) - size_bytes) <= 100
    usage = json.loads(body)["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def test_a_stream_ends_as_vllm_ends_it() -> None:
    events = answers.stream(4)
    assert events[-1] == b"data: [DONE]\n\n"
    assert json.loads(events[-2].removeprefix(b"data: "))["usage"]["total_tokens"] == 77


def test_the_worker_takes_the_requests_and_everyone_gets_the_same() -> None:
    request = messages.make_request()
    plain, _ = messages.wrap_plain(request, "q")
    assert decode_request(plain).request_id == request["request_id"]
    dramatiq, _ = messages.wrap_dramatiq(request, "q")
    celery, properties = messages.wrap_celery(request, "q")
    assert json.loads(dramatiq)["args"] == json.loads(celery)[0] == [request]
    assert properties.headers["task"] == "infer"
    assert len(request["payload"]["messages"][0]["content"]) == messages.PROMPT_BYTES


def test_cpu_time_of_a_process_is_its_own_clock() -> None:
    before = process_usage.cpu_s([os.getpid()])
    assert abs(before - time.process_time()) < 0.05
    assert process_usage.cpu_s([2**22 + 1]) == 0.0


def test_a_process_has_itself_in_its_tree() -> None:
    assert os.getpid() in process_usage.process_tree(os.getpid())
    assert os.getpid() in process_usage.process_tree(os.getppid())


def test_only_what_is_not_there_in_its_version_is_missing() -> None:
    text = "# a comment\n-r requirements.txt\n\npytest==0.0.1  # old\nno-such-package==1.0\n"
    assert missing_requirements(text) == ["pytest==0.0.1", "no-such-package==1.0"]


def test_the_requirements_are_pinned() -> None:
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    assert all("==" in line for line in lines if line)


def test_every_figure_can_be_asked_for() -> None:
    assert tuple(figure.NAME for figure in FIGURES) == _NAMES
    assert read_arguments(["--only", _NAMES[0]]).only == [_NAMES[0]]


def test_lengths_are_read_from_headers() -> None:
    assert content_length(b"POST / HTTP/1.1\r\ncontent-LENGTH: 12\r\nA: b") == 12
    assert content_length(b"GET / HTTP/1.1\r\nA: b") == 0
    assert answer_length(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab") == 43
    assert answer_length(b"HTTP/1.1 200 OK\r\nContent-Le") is None
