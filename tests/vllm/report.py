"""docs/vllm.md, written from a run. Pure, but for the one file that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.rig import Rig

_INTRODUCTION = """\
# The worker and a real vLLM

`make e2e-vllm` installs vLLM for the CPU into `.devstack/vllm` (once: five minutes, 3 GB), gives it a tiny model of
random weights (`devstack/tiny_model.py`), and runs the worker as a process between a real RabbitMQ, that vLLM and a
real Redis. Each scenario is compared with what the same vLLM says when it is asked directly. It is no part of CI. This
page is written by `python -m tests.vllm --record`; its numbers are from two cores that others used as well.
"""

_DIFFERENCES = """\
## Streamed and plain answers

The result of a streamed request is put together from its chunks. It is the plain answer, field by field, but for what
vLLM itself does not stream, or says otherwise there. `tests/captures/vllm-*.sse` and `.json` hold both as vLLM sent
them, and `tests/unit/test_model_stream_captures.py` holds the two equal.

Null in the plain answer and in no chunk, so absent from the result, as found in this run:

{absent}

Other differences, as found in this run:

{other}

Why:

- **`arguments` of a tool call**: vLLM parses them and writes them anew for a plain answer; the chunks hold them as the
  model wrote them, white space included. The same JSON value.
- **`content` beside tool calls**: with `tool_choice` "required" or a named function vLLM's plain answer has `""`, with
  "auto" null. The chunks are the same in all three cases (`""` with the role, then null), so no client can tell them
  apart; the result has null, as OpenAI's own answers have.
- **A tool call that `max_tokens` cuts off** ("auto"): the plain answer has the raw text as `content` and no
  `tool_calls`; the chunks hold the call as far as it went, and so does the result. Both end with "length".
- `metrics` is null for `n` above 1, and then not in the stream either. TTFT and TBT are then the worker's own.
"""

_NOTES = """\
## What vLLM does when it goes away, and other things to know

- SIGTERM: running requests are answered with 200, `finish_reason: "abort"` and the text so far, streamed ones too;
  then connections are refused. The worker takes such an answer for none and retries.
  On a machine without a core to spare it once hung in its shutdown instead, answering nobody, until SIGKILL.
- The engine process killed: running requests get HTTP 500 ("EngineCore encountered an issue ..."), a stream gets it as
  an error event after its chunks (`tests/captures/vllm-stream-error-500-engine.sse`, shortened in the middle); then the
  server exits with 0. By default that is the producer's answer; with `MODEL_RETRY_STATUS_CODES=500` it is retried.
- `--max-num-queued-reqs`: what does not fit gets HTTP 503 at once, without Retry-After. A stream may have got its 200
  before; then the 503 is an error event (`tests/captures/vllm-stream-error-503-busy.sse`).
- On a busy machine vLLM sends many chunks of a stream at once, after a pause; whoever reads it sees the same.
- The first request with `logprobs` may take half a minute: vLLM compiles something for it.
- `CUDA_VISIBLE_DEVICES=""` breaks the CPU build: it then believes in Triton, and its engine dies at the first request.
"""


@dataclass(frozen=True)
class Line:
    """How one scenario went."""

    title: str
    seen: str
    took_s: float
    passed: bool


def write_report(path: Path, *, lines: Sequence[Line], versions: dict[str, str], verdict: str, rig: Rig) -> None:
    """Write the document."""
    absent = "\n".join(f"- `{name}`" for name in sorted(rig.absent))
    other = "\n".join(
        f"- {kind}: `{at}`: {_shortened(what)}"
        for kind, found in rig.other_differences.items()
        for at, what in found.items()
    )
    output = [
        f"{'ok' if line.passed else 'FAILED'}  {line.title} ({line.took_s:.1f} s)\n      {line.seen}" for line in lines
    ]
    output += ["", ", ".join(f"{name} {version}" for name, version in versions.items()), verdict]
    parts = [
        _INTRODUCTION,
        _DIFFERENCES.format(absent=absent, other=other),
        _NOTES,
        "## The run\n\n```\n" + "\n".join(output) + "\n```\n",
    ]
    path.write_text("\n".join(parts))


def _shortened(text: str, *, length: int = 100) -> str:
    return text if len(text) <= length else f"{text[:length]} ..."
