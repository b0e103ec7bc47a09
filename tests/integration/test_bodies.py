"""Bodies that nobody should send: a 400 where there is somebody to tell, the dead-letter queue, and life goes on."""

from __future__ import annotations

import json
from typing import Any

import pika
import pytest

from devstack.proxy import Direction, TcpProxy
from devstack.worker_process import WorkerProcess

from .support import FAILED_KEYS, TTL_S, Deployment

pytestmark = pytest.mark.integration

DEEP = b"[" * 20_000 + b"]" * 20_000
PROMPT = "Can you read this?"
#: cannot be decoded, and has no request_id that could be read
UNREADABLE = {
    "empty": b"",
    "white-space": b" \n",
    "text": b"Say hello.",
    "half": b'{"request_id": "half-',
    "not-utf-8": b"\xff\xfe\x00{\x00}\x00",
    "utf-16": '{"request_id":"r"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"payload":{}}',
    "20000-brackets": DEEP,
    "null": b"null",
    "number": b"17",
    "string": b'"hello"',
    "list": b"[]",
    "empty-object": b"{}",
    "binary": bytes(range(256)),
}
#: of the wrong type, in a request that is right otherwise
WRONG_FIELDS: list[tuple[str, Any]] = [
    ("received_at", "2026-01-01T00:00:00Z"),
    ("received_at", "1772000000"),
    ("received_at", True),
    ("received_at", []),
    ("received_at", 1_772_000_000_000),
    ("timeout_s", "60"),
    ("timeout_s", {}),
    ("payload", "Say hello."),
    ("payload", []),
    ("payload", 1),
]
WRONG_IDS: list[Any] = ["", " ", "two words", "line\nbreak", "x" * 256, 17, None, True, ["a"], {"a": 1}]


@pytest.fixture(scope="module", params=["classic", "quorum"])
def queue_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def worker(deployment: Deployment, queue_type: str) -> WorkerProcess:
    return deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type)


def check_dead_letters(deployment: Deployment, bodies: list[bytes]) -> None:
    """All of them are dead letters, unchanged, and nothing else is; the next request is served."""
    letters = deployment.wait_dead_letters(len(bodies))
    assert sorted(letter.body for letter in letters) == sorted(bodies)
    assert {letter.headers["x-death"][0]["reason"] for letter in letters} == {"rejected"}
    deployment.serve_next()
    assert len(deployment.model.ledger.calls) == 1
    assert len(deployment.dead_letters()) == len(bodies)


def check_400(deployment: Deployment, request_id: str, *, names: str) -> None:
    result = deployment.wait_result(request_id)
    assert set(result) == FAILED_KEYS
    assert (result["status"], result["status_code"], result["error_type"]) == ("failed", 400, "malformed_request")
    assert names in result["error"]
    assert TTL_S - 100 < deployment.result_ttl_s(request_id) <= TTL_S


def test_a_body_that_cannot_be_read_is_a_dead_letter(deployment: Deployment, worker: WorkerProcess) -> None:
    for body in UNREADABLE.values():
        deployment.publish(body)
    check_dead_letters(deployment, list(UNREADABLE.values()))
    deployment.stop_empty(worker)


def test_a_body_without_a_usable_id_is_a_dead_letter(deployment: Deployment, worker: WorkerProcess) -> None:
    bodies = [json.dumps({**deployment.request(PROMPT), "request_id": wrong}).encode() for wrong in WRONG_IDS]
    for body in bodies:
        deployment.publish(body)
    check_dead_letters(deployment, bodies)
    deployment.stop_empty(worker)


def test_a_field_of_the_wrong_type_is_a_400_that_names_it(deployment: Deployment, worker: WorkerProcess) -> None:
    requests = [(name, deployment.request(PROMPT, **{name: value})) for name, value in WRONG_FIELDS]
    requests += [(name, deployment.request(PROMPT, **{name: None})) for name in ("received_at", "timeout_s", "payload")]
    bodies = [json.dumps(request).encode() for _, request in requests]
    for body in bodies:
        deployment.publish(body)
    for name, request in requests:
        check_400(deployment, request["request_id"], names=name)
    check_dead_letters(deployment, bodies)
    deployment.stop_empty(worker)


def test_a_body_that_is_no_json_behind_its_id_is_a_400(deployment: Deployment, worker: WorkerProcess) -> None:
    whole = json.dumps(deployment.request(PROMPT, request_id="ID")).encode()
    bodies = {
        f"cut-{deployment.deployment_id}": whole[:-20],
        f"nan-{deployment.deployment_id}": whole.replace(b'"timeout_s": 60.0', b'"timeout_s": NaN'),
        f"latin-1-{deployment.deployment_id}": whole.replace(PROMPT.encode(), b"caf\xe9"),
        f"deep-{deployment.deployment_id}": whole.replace(b'"payload": {', b'"payload": {"deep": ' + DEEP + b", "),
        f"junk-{deployment.deployment_id}": whole + b"}",
    }
    bodies = {request_id: body.replace(b'"ID"', json.dumps(request_id).encode()) for request_id, body in bodies.items()}
    for body in bodies.values():
        deployment.publish(body)
    for request_id in bodies:
        check_400(deployment, request_id, names="")
    check_dead_letters(deployment, list(bodies.values()))
    deployment.stop_empty(worker)


def test_r28_a_message_without_any_properties_goes_every_way(deployment: Deployment, worker: WorkerProcess) -> None:
    bare = pika.BasicProperties()
    deployment.model.behave(match="fail twice", fault="reset_body")
    good, failing = deployment.request(PROMPT), deployment.request("fail twice")
    for body in (good, failing, b"no JSON"):
        deployment.publish(body, properties=bare)
    assert deployment.wait_result(good["request_id"])["status"] == "completed"
    assert deployment.wait_result(failing["request_id"])["status_code"] == 500
    letters = deployment.wait_dead_letters(2)
    assert {letter.body for letter in letters} == {json.dumps(failing).encode(), b"no JSON"}
    deployment.serve_next()


def test_r46_a_payload_nested_900_deep_reaches_the_model_byte_for_byte(deployment: Deployment, queue_type: str) -> None:
    deep = '{ "model": "m",  "messages":[{"role":"user","content":"How deep?"}], "deep": ' + "[" * 900 + "]" * 900 + "}"
    seen = bytearray()
    with TcpProxy(deployment.model.port) as model_proxy:
        model_proxy.observe(Direction.TO_SERVER, seen.extend)
        url = f"http://127.0.0.1:{model_proxy.port}"
        deployment.start_worker(RABBITMQ_QUEUE_TYPE=queue_type, MODEL_CONTAINER_URL=url)
        body = json.dumps(deployment.request(PROMPT, payload="PAYLOAD")).replace('"PAYLOAD"', deep)
        deployment.publish(body.encode())
        assert deployment.wait_result(json.loads(body)["request_id"])["status"] == "completed"
    assert b"\r\n\r\n" + deep.encode() in seen
    assert deployment.calls("How deep?") == 1
