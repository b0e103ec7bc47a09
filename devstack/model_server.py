"""An OpenAI-compatible model server that answers as vLLM does, and misbehaves on command.

In a test: `with ModelServer() as model: model.behave(match="slow one", times=1, delay_s=5)`. As a process:
`python -m devstack.model_server --port 0 --control-port 0`, which prints both URLs as one line of JSON.

Two ports: the model's own, which can refuse connections, and the control port, which always answers:
`PUT /_control`, `GET /_ledger` (both there on the model's port as well, while it listens).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from devstack import chat_completions
from devstack.behaviour import Answer, Behaviour, Fault, Script, deliver
from devstack.chat_completions import Completion, ModelError, Timing, encode_json
from devstack.http_server import ClientGone, Exchange, HttpServer
from devstack.ledger import Call, Ledger

CHAT_PATH = "/v1/chat/completions"
DEFAULT_MODEL = "acme/tiny-1"
_JSON = {"Content-Type": "application/json"}
_TEXT = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
_FINGERPRINT = "devstack-1"
#: faults that deliver the whole completion all the same
_WITH_COMPLETION = (Fault.NONE, Fault.STALL, Fault.TRICKLE)


class EngineCounters:
    """The live numbers behind /metrics. Safe from any thread."""

    def __init__(self, *, slots: int, kv_cache_tokens: int) -> None:
        self._kv_cache_tokens = kv_cache_tokens
        self._slots = threading.Semaphore(slots)
        self._lock = threading.Lock()
        self._seen_prompts: set[int] = set()
        self._kv_used = 0
        self._numbers = {
            "num_requests_running": 0.0,
            "num_requests_waiting": 0.0,
            "prompt_tokens_total": 0.0,
            "generation_tokens_total": 0.0,
            "prefix_cache_queries_total": 0.0,
            "prefix_cache_hits_total": 0.0,
            "num_preemptions_total": 0.0,
        }

    def enter(self, exchange: Exchange, request: chat_completions.ChatRequest) -> int:
        """Take a slot, waiting for one if need be; return how many tokens of the prompt are in the prefix cache.

        Raises:  ClientGone while waiting
        """
        self._add(num_requests_waiting=1)
        try:
            while not self._slots.acquire(timeout=0.05):
                exchange.pause(0.001)
        finally:
            self._add(num_requests_waiting=-1)
        with self._lock:
            prompt = hash(request.text)
            cached = request.prompt_tokens if prompt in self._seen_prompts else 0
            self._seen_prompts.add(prompt)
            self._kv_used += request.prompt_tokens
        self._add(
            num_requests_running=1,
            prompt_tokens_total=request.prompt_tokens,
            prefix_cache_queries_total=request.prompt_tokens,
            prefix_cache_hits_total=cached,
        )
        return cached

    def count_generated(self, tokens: int) -> None:
        """Enter tokens as they are generated."""
        self._add(generation_tokens_total=tokens)

    def leave(self, request: chat_completions.ChatRequest) -> None:
        """Give the slot back."""
        with self._lock:
            self._kv_used -= request.prompt_tokens
        self._add(num_requests_running=-1)
        self._slots.release()

    def _add(self, **changes: float) -> None:
        with self._lock:
            for name, change in changes.items():
                self._numbers[name] += change

    def encode(self, model: str) -> bytes:
        """Encode in Prometheus' text format."""
        with self._lock:
            numbers = {**self._numbers, "kv_cache_usage_perc": self._kv_used / self._kv_cache_tokens}
        lines = []
        for name, value in numbers.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# HELP vllm:{name} As in vLLM.")
            lines.append(f"# TYPE vllm:{name} {kind}")
            lines.append(f'vllm:{name}{{engine="0",model_name="{model}"}} {value}')
        return "\n".join([*lines, ""]).encode()


class ModelServer:
    """The server. Safe from any thread."""

    def __init__(
        self,
        *,
        model: str = DEFAULT_MODEL,
        only_known_model: bool = False,
        context_tokens: int = 1_000_000,
        slots: int = 256,
        kv_cache_tokens: int = 2_097_152,
        port: int = 0,
        control_port: int = 0,
    ) -> None:
        self.model = model
        self.ledger = Ledger()
        self._known_models = frozenset({model}) if only_known_model else frozenset()
        self._context_tokens = context_tokens
        self._chat_script = Script()
        self._health_script = Script()
        self._metrics_script = Script()
        self._counters = EngineCounters(slots=slots, kv_cache_tokens=kv_cache_tokens)
        self._server = HttpServer(self._answer, port=port)
        self._control = HttpServer(self._answer_control, port=control_port)
        self.url = self._server.url
        self.port = self._server.port
        self.control_url = self._control.url

    def start(self) -> ModelServer:
        """Listen on both ports; also ends a `refuse`."""
        self._server.start()
        self._control.start()
        return self

    def close(self) -> None:
        """End all connections and give the ports back."""
        self._server.close()
        self._control.close()

    def __enter__(self) -> ModelServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def behave(self, *, match: str | None = None, times: int | None = None, **behaviour: Any) -> None:
        """Tell how to answer from now on, or the next `times` requests whose body holds the text `match`.

        The other arguments are the fields of `Behaviour`; none at all is good behaviour.
        """
        self._chat_script.tell(Behaviour.from_document(behaviour), match=match, times=times)

    def behave_health(self, **behaviour: Any) -> None:
        """Tell how to answer GET /health from now on."""
        self._health_script.tell(Behaviour.from_document(behaviour))

    def behave_metrics(self, **behaviour: Any) -> None:
        """Tell how to answer GET /metrics from now on."""
        self._metrics_script.tell(Behaviour.from_document(behaviour))

    def forget_behaviours(self) -> None:
        """Back to good behaviour everywhere."""
        for script in (self._chat_script, self._health_script, self._metrics_script):
            script.forget()

    def refuse(self) -> None:
        """Refuse connections and reset those that are open, as a crashed server would; `start` ends it."""
        self._server.refuse()

    def end_connections(self, *, reset: bool = False) -> None:
        """End the open connections, idle ones too, and go on listening."""
        self._server.end_connections(reset=reset)

    def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        match request.method, request.path:
            case "POST", path if path == CHAT_PATH:
                self._answer_chat(exchange)
            case "GET", "/health":
                deliver(exchange, Answer(200), self._health_script.behaviour_for(b""))
            case "GET", "/metrics":
                answer = Answer(200, self._counters.encode(self.model), _TEXT)
                deliver(exchange, answer, self._metrics_script.behaviour_for(b""))
            case "GET", "/v1/models":
                card = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": self._context_tokens}
                exchange.respond(200, encode_json({"object": "list", "data": [card]}), headers=_JSON)
            case _, path if path.startswith("/_"):
                self._answer_control(exchange)
            case _, path if path in (CHAT_PATH, "/health", "/metrics", "/v1/models"):
                exchange.respond(405, encode_json({"detail": "Method Not Allowed"}), headers=_JSON)
            case _:
                exchange.respond(404, encode_json({"detail": "Not Found"}), headers=_JSON)

    def _answer_chat(self, exchange: Exchange) -> None:
        body = exchange.request.body
        behaviour = self._chat_script.behaviour_for(body)
        call = self.ledger.begin(
            chat_completions.text_of(body),
            request_id=exchange.request.headers.get("x-request-id"),
            streamed=False,
        )
        call.fault = behaviour.fault.value
        queued_at = time.monotonic()
        try:
            try:
                request = chat_completions.load_request(
                    body, known_models=self._known_models, context_tokens=self._context_tokens
                )
            except ModelError as err:
                call.status = sent_status(behaviour, err.status)
                deliver(exchange, err.to_answer(), behaviour)
            else:
                call.streamed = request.stream
                self._generate(exchange, request, behaviour, call, queued_at=queued_at)
        except ClientGone:
            self.ledger.mark_hung_up(call)
            raise
        self.ledger.mark_answered(call)

    def _generate(
        self,
        exchange: Exchange,
        request: chat_completions.ChatRequest,
        behaviour: Behaviour,
        call: Call,
        *,
        queued_at: float,
    ) -> None:
        cached = self._counters.enter(exchange, request)
        try:
            timing = Timing(queued_at, time.monotonic(), time.monotonic())
            completion = chat_completions.complete(
                request,
                content=behaviour.content,
                completion_tokens=behaviour.completion_tokens,
                finish_reason=behaviour.finish_reason,
                cached_tokens=behaviour.cached_tokens if behaviour.cached_tokens is not None else (cached or None),
            )
            call.status = sent_status(behaviour, 200)
            if behaviour.body is None and call.status == 200 and behaviour.fault in _WITH_COMPLETION:
                call.prompt_tokens = request.prompt_tokens
                call.completion_tokens = completion.completion_tokens
            if request.stream:
                events = self._paced_events(exchange, completion, timing, behaviour)
                deliver(exchange, Answer(200, b"", _EVENTS, events), behaviour)
                return
            timing.token_count = completion.completion_tokens
            tokens_of_a_choice = completion.completion_tokens // request.choice_count
            exchange.pause(behaviour.token_delay_s * tokens_of_a_choice)
            self._counters.count_generated(completion.completion_tokens)
            body = chat_completions.encode_completion(completion, timing, fingerprint=_FINGERPRINT)
            if call.completion_tokens:
                call.answer_sha256 = hashlib.sha256(body).hexdigest()
            deliver(exchange, Answer(200, body, _JSON), behaviour)
        finally:
            self._counters.leave(request)

    def _paced_events(
        self, exchange: Exchange, completion: Completion, timing: Timing, behaviour: Behaviour
    ) -> Iterator[bytes]:
        choice_count = completion.request.choice_count
        last_token = choice_count + completion.completion_tokens
        events = chat_completions.stream_completion(completion, timing, fingerprint=_FINGERPRINT)
        for number, event in enumerate(events):
            if choice_count <= number < last_token:  # after the openings, before the usage
                exchange.pause(behaviour.token_delay_s / choice_count)
                if not timing.token_count:
                    timing.first_token_at = time.monotonic()
                timing.token_count += 1
                self._counters.count_generated(1)
            yield event

    def _answer_control(self, exchange: Exchange) -> None:
        request = exchange.request
        match request.method, request.path:
            case "PUT", "/_control":
                try:
                    self._obey(json.loads(request.body))
                except (ValueError, TypeError, AttributeError) as err:
                    exchange.respond(400, encode_json({"error": str(err)}), headers=_JSON)
                else:
                    exchange.respond(204)
            case "GET", "/_ledger":
                exchange.respond(200, encode_json({"calls": self.ledger.to_documents()}), headers=_JSON)
            case _:
                exchange.respond(404, encode_json({"error": "PUT /_control or GET /_ledger"}), headers=_JSON)

    def _obey(self, order: dict[str, Any]) -> None:
        """Carry out a control document: any of `behaviour` (with `match`, `times`), `health`, `metrics`, `listening`.

        Raises:  ValueError, TypeError for a document that is not understood
        """
        known = {"behaviour", "match", "times", "health", "metrics", "listening", "forget"}
        if unknown := set(order) - known:
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
        if order.get("forget"):
            self.forget_behaviours()
        if "behaviour" in order:
            self.behave(match=order.get("match"), times=order.get("times"), **order["behaviour"])
        if "health" in order:
            self.behave_health(**order["health"])
        if "metrics" in order:
            self.behave_metrics(**order["metrics"])
        if "listening" in order:
            if order["listening"]:
                self._server.start()
            else:
                # From a thread of its own: the order may have come over a connection that this resets
                threading.Thread(target=self._server.refuse, name="model-refuse", daemon=True).start()


def sent_status(behaviour: Behaviour, own_status: int) -> int | None:
    """Return the status that the client gets to see; None when the behaviour sends none."""
    if behaviour.fault in (Fault.RESET, Fault.DROP, Fault.RAW):
        return None
    return own_status if behaviour.status is None else behaviour.status


def main() -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m devstack.model_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="the model's port (default: a free one)")
    parser.add_argument("--control-port", type=int, default=0, help="the control port (default: a free one)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the name that /v1/models gives (default: %(default)s)")
    parser.add_argument("--only-known-model", action="store_true", help="answer 404 to any other model")
    parser.add_argument("--context-tokens", type=int, default=1_000_000, help="answer 400 to longer prompts")
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with ModelServer(
        model=arguments.model,
        only_known_model=arguments.only_known_model,
        context_tokens=arguments.context_tokens,
        port=arguments.port,
        control_port=arguments.control_port,
    ) as server:
        print(json.dumps({"url": server.url, "control_url": server.control_url}), flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


if __name__ == "__main__":
    sys.exit(main())
