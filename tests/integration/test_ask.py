"""`make ask`: the answer appears as it is made, and Ctrl-C cancels it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from devstack.ask import ask
from devstack.processes import wait_until
from devstack.up import to_state

from .support import LONG_TIMEOUT_S, Deployment, said

pytestmark = pytest.mark.integration


def test_the_answer_is_printed_once_and_whole(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    worker = deployment.start_worker()
    assert ask("tell me of rivers", to_state(deployment, worker)) == 0
    assert capsys.readouterr().out == said("tell me of rivers") + "\n"
    (call,) = deployment.model.ledger.calls if deployment.model else ()
    assert call.streamed


def test_an_answer_of_a_model_that_does_not_stream_is_printed_too(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = deployment.start_worker()
    assert deployment.model is not None
    body = '{"choices": [{"index": 0, "message": {"role": "assistant", "content": "all at once"}}]}'
    deployment.model.behave(match="whole", status=200, body=body, headers={"Content-Type": "application/json"})
    assert ask("the whole of it", to_state(deployment, worker)) == 0
    assert capsys.readouterr().out == "all at once\n"


def test_an_error_is_told(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    worker = deployment.start_worker()
    assert deployment.model is not None
    deployment.model.behave(match="refuse", status=400, body='{"error":{"message":"not this"}}')
    assert ask("refuse me", to_state(deployment, worker)) == 1
    assert capsys.readouterr().err == "failed 400: not this\n"


@pytest.fixture
def _sigint_interrupts() -> Iterator[None]:
    """Have SIGINT raise: whatever was started in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint_interrupts")
def test_ctrl_c_cancels_the_request(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    worker = deployment.start_worker()
    assert deployment.model is not None
    ledger = deployment.model.ledger
    deployment.model.behave(match="slowly", token_delay_s=1.0)

    with deployment.redis_server.client() as client:
        before = set(client.keys("infer_stream:*"))

    def interrupt() -> None:
        with deployment.redis_server.client() as client:
            wait_until(
                lambda: set(client.keys("infer_stream:*")) - before, timeout_s=LONG_TIMEOUT_S, what="the first chunk"
            )
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    assert ask("tell it slowly", to_state(deployment, worker)) == 130
    interrupter.join()
    assert capsys.readouterr().err.endswith("cancelled\n")
    # nobody waits for the rest, so the model does not make it
    ledger.wait_for_hang_up("tell it slowly")
    deployment.serve_next()
    deployment.stop_empty(worker)
