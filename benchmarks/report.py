"""docs/performance.md and its picture, written from a run's results. Pure but for `write_report`."""

from __future__ import annotations

from pathlib import Path

from benchmarks import chart
from benchmarks.figures import FIGURES
from benchmarks.goals import goals_table
from benchmarks.messages import PROMPT_BYTES
from benchmarks.results import Results
from benchmarks.tables import Table

PROJECT_FOLDER = Path(__file__).parent.parent
DOCUMENT = PROJECT_FOLDER / "docs" / "performance.md"
PICTURE = DOCUMENT.with_suffix(".svg")
#: written by people: where the time goes, and why a goal was missed
NOTES = Path(__file__).parent / "notes.md"

_OPENING = """\
# Performance

What the worker costs, measured against the shortest honest loop that does the job, and against what people would use
instead. Written by `make bench`: change `benchmarks/`, not this page.

![Time per message, added latency, slots kept busy](performance.svg)
"""
_REPEAT = """\
## How to repeat it

`make bench` brings up a private RabbitMQ, a private Redis, an instant model, MetricServer and Croesus on loopback,
measures, and writes this page. It takes {duration}.
`python -m benchmarks.run --help` lists the parts: `--only NAME` measures one figure, with `--again` for this page,
`--rounds N` sets the rounds, `--scale 0.1` makes each of them smaller, `--quick` compares the bare loop and the worker
in under a minute. `--million` watches the memory over a million messages, in half an hour, and `--report` then writes
this page again with what it saw in place of the short look that `make bench` takes.

The contenders are in `benchmarks/contenders/`: each is a process of its own, does the same call and stores the same
result with the same messages (a prompt of {prompt_bytes} bytes), and takes its turn in every round; each round begins
with another one. The worker is `python -m inference_worker` with nothing set but the addresses, its identity and the
prefetch: health probes, metrics, billing and one line of log a message to a file are on. Dramatiq and Celery run with
their defaults, but for what an honest comparison needs of Celery: late acks, and no more messages fetched than threads.
Neither has a result backend; the task itself writes to Redis.
"""


def report(results: Results, *, notes: str) -> str:
    """Write the document."""
    facts = Table("Machine and versions", ("", ""), [[name, value] for name, value in results.facts.items()])
    parts = [_OPENING, goals_table(results).to_markdown()]
    if notes.strip():
        parts.append(f"## Where the time goes\n\n{notes.strip()}\n")
    parts += [table.to_markdown() for table in all_tables(results)]
    parts.append(facts.to_markdown().replace("---:", "---"))
    duration = results.facts.get("duration", "half an hour")
    parts.append(_REPEAT.format(duration=duration, prompt_bytes=PROMPT_BYTES))
    if results.notes:
        parts.append("## What went wrong\n\n" + "\n".join(f"- {note}" for note in results.notes) + "\n")
    return "\n".join(parts)


def all_tables(results: Results) -> list[Table]:
    """Return the tables of all figures that were measured."""
    return [table for figure in FIGURES for table in figure.tables(results)]


def write_report(results: Results) -> None:
    """Write both files."""
    notes = NOTES.read_text() if NOTES.exists() else ""
    DOCUMENT.write_text(report(results, notes=notes))
    PICTURE.write_text(chart.draw(chart.panels(results)))
