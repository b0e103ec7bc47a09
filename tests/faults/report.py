"""docs/reliability.md and its pictures, from the numbers of the runs: for who decides whether to trust the worker."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import growth_chart, timeline

_Document = dict[str, Any]

_INTRO = """\
# Reliability

What became of every request while its neighbours, its links and the worker itself were killed, cut, stalled and
refused. Written by `make faults`, `make soak` and `make faults-report`: change `tests/faults/`, not this page.

Three workers (real processes) on one queue, {per_second:g} requests a second with model latencies of 50 to 500 ms,
one answer in fifteen is streamed, one request in fifty is of a kind that can only fail. Faults strike at exact
points: each worker talks through proxies that understand AMQP, Redis' protocol and HTTP, hold the bytes at the point,
do the harm, and let go. The first part of a run has every kind in turn, and waits until all is well; the last part
has random kinds in random order, up to four not yet overcome. Then the load stops, the queue empties, and a checker
that knows nothing of the worker counts: Redis' append-only file (every write that took), the results, the queues, the
model's own ledger of calls, and what the billing took.

![Requests per second of a run, its faults, and a close-up of a kill of the broker](reliability-timeline.svg)
"""

_READING = """\
A second call of the model is no error, but it costs GPU time, so each is put down to its reason; one without a reason
would be in the table above. The worker asks twice only when nobody can know that the first answer will be stored: its
worker was killed, its session was lost while it ran, Redis did not take the answer, or the model broke off.
"""

_RECOVERY = """\
From the end of the cause (the process is dead, the link is open again, the server answers) until all three workers
consume and every request that was published before has its result. From the part with every kind in turn.
"""

_SOAK = """\
{minutes:.0f} minutes, {count} faults at random. One worker is never ended, though its links and servers are. What the
kernel says of it, over the last half of the time:
"""

_LEVELS = """
A killed Redis or model closes all connections to it at once, and they come back as they are used; a copy of a message
takes one more for a moment: the descriptors go up and down with the faults, without a leak. What leaks never goes away,
and lifts the median of each five minutes above the one before. In that half the medians were:

- threads: {threads}
- descriptors: {descriptors}
- memory: {memory} MB
"""

_SOAK_PICTURE = """
![Memory, threads and descriptors of that worker over the whole soak](reliability-soak.svg)
"""

_REPEAT = """\
## How to repeat it

```console
$ make faults FAULTS=200 QUEUE_TYPE=classic SEED={seed}   # half an hour; ends with 0 only when every promise was kept
$ make faults FAULTS=200 QUEUE_TYPE=quorum
$ make faults-quick                                   # three minutes, each kind once at most; in CI as well
$ make soak MINUTES=60                                # at random, watching memory, threads and descriptors
$ make faults-report                                  # writes this page from the runs so far
```

The seed makes the order of the faults and their lengths; what the machine does in between is its own. The checker is
proven in `tests/faults/test_checker.py`: workers with one law broken each (acks before the SET, waits for no confirm,
checks no session, requeues in a loop, bills failures) are found out by it, each by the counter that it must be.
"""

_NOT_COVERED = """\
## What is not covered

- **Redis without its append-only file.** It runs here with `appendonly yes` and `appendfsync always`: with less, a
  kill of Redis loses results that were stored, acked and billed, and no worker can know. That loss is Redis', and a
  matter of its settings.
- **The loss of a host.** Processes are killed, the kernel lives: what was written is there afterwards. A power cut
  may lose what a disk had not taken, in the broker, in Redis, and of the outbox of usage events.
- **A dead-letter queue that is deleted within a second of a declare.** The worker declares it again before it rejects,
  at most once a second; what is rejected in between goes where the queue went. Its `failed` result is in Redis all the
  same, if its id can be read. The run deletes the queue and waits for that time.
- **Dead letters of a broker that is killed**: RabbitMQ moves a rejected message to the dead-letter queue without
  confirms. It may lose it when it is killed within a moment, and a classic queue of 4.3 those of minutes, since it
  keeps in memory what nobody waits for. No worker can know; counted above. `RABBITMQ_QUEUE_TYPE=quorum` makes the
  dead-letter queue a quorum queue as well, which lost none. Who sent the request has its `failed` result in any case,
  if its id can be read.
- **Clusters**: one broker node, one Redis. A cluster of three that loses nodes is in
  `tests/integration/test_cluster.py`; partitions between nodes are another matter.
- **Records for MetricServer**: those that a killed worker had not sent are lost, by design; counted above.
- **Network faults below TCP** (loss, reordering): links are cut, refused and stalled whole. Packets that vanish are in
  `tests/integration/test_vanished_packets.py`.
"""


def write(results_folder: Path, docs_folder: Path) -> None:
    """Write the page and its pictures from all runs that left their numbers.

    Raises:  FileNotFoundError when there is none
    """
    runs, soak = load(results_folder)
    if not runs:
        raise FileNotFoundError(f"no runs in {results_folder}: make faults first")
    (docs_folder / "reliability.md").write_text(render(runs, soak))
    (docs_folder / "reliability-timeline.svg").write_text(timeline.draw(runs[0]))
    if soak is not None and soak["samples"]:
        (docs_folder / "reliability-soak.svg").write_text(growth_chart.draw(soak["samples"]))


def load(folder: Path) -> tuple[list[_Document], _Document | None]:
    """Return the whole runs, and the soak if there is one; quick runs are no evidence."""
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    runs = [document for name, document in documents.items() if name != "soak" and not name.startswith("quick-")]
    return runs, documents.get("soak")


def render(runs: Sequence[_Document], soak: _Document | None) -> str:
    """Write the page."""
    parts = [
        _INTRO.format(per_second=runs[0]["plan"]["per_second"]),
        "## Promises\n",
        _promises(runs, soak),
        "## Calls of the model\n",
        _READING,
        _calls(runs, soak),
        "## Faults, and how soon all was well again\n",
        _RECOVERY,
        _faults(runs),
    ]
    if soak is not None:
        parts += ["## A soak\n", _soak(soak)]
    parts += ["## What it ran on\n", _machine(runs, soak), _REPEAT.format(seed=runs[0]["plan"]["seed"]), _NOT_COVERED]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers_from: int = 1) -> str:
    """Write a table; columns from `numbers_from` on are numbers."""
    marks = ["---" if index < numbers_from else "---:" for index in range(len(head))]
    lines = [list(head), marks, *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _name(document: _Document) -> str:
    broker = f"RabbitMQ {document['versions']['RabbitMQ']}, {document['plan']['queue_type']}"
    return f"soak ({broker})" if document["plan"]["is_soak"] else broker


def _count(document: _Document, name: str) -> str:
    """Write a count; a run from before it was counted has none."""
    return f"{document['counts'][name]:,}" if name in document["counts"] else "–"


def _columns(runs: Sequence[_Document], soak: _Document | None) -> list[_Document]:
    return [*runs, *([soak] if soak else [])]


def _promises(runs: Sequence[_Document], soak: _Document | None) -> str:
    columns = _columns(runs, soak)
    rows: list[list[object]] = [
        ["**faults injected**", *(f"**{len(each['faults'])}**" for each in columns)],
        ["requests", *(_count(each, "requests") for each in columns)],
        ["of them streamed", *(_count(each, "streamed") for each in columns)],
        ["of them such as can only fail", *(_count(each, "must_fail") for each in columns)],
    ]
    for name, meaning in columns[0]["bad_meanings"].items():
        rows.append([f"{name.replace('_', ' ')}: {meaning}", *(f"**{each['bad'].get(name, 0)}**" for each in columns)])
    rows += [
        ["*dead letters that the broker itself lost, by its kill -9*"]
        + [_count(each, "dead_letters_lost_by_the_killed_broker") for each in columns],
        ["*usage events sent again under the same id (Croesus drops them)*"]
        + [_count(each, "usage_events_repeated_under_the_same_id") for each in columns],
        ["*completed requests without a final record at MetricServer*"]
        + [_count(each, "requests_without_a_final_record") for each in columns],
        ["*times that the machine itself stood still for over a second*"]
        + [f"{len(each['standstills'])}" for each in columns],
    ]
    return table(["", *map(_name, columns)], rows)


def _calls(runs: Sequence[_Document], soak: _Document | None) -> str:
    columns = _columns(runs, soak)
    reasons = sorted({reason for each in columns for reason in each["repeated_calls"]})
    rows: list[list[object]] = [["all calls", *(_count(each, "model_calls") for each in columns)]]
    rows += [
        [f"again, since {reason}", *(f"{each['repeated_calls'].get(reason, 0):,}" for each in columns)]
        for reason in reasons
    ]
    rows.append(["**again for no reason**", *(f"**{each['bad']['unexplained_calls']}**" for each in columns)])
    return table(["", *map(_name, columns)], rows)


def _faults(runs: Sequence[_Document]) -> str:
    rows: dict[tuple[str, str], list[_Document]] = {}
    for document in runs:
        for fault in document["faults"]:
            rows.setdefault((fault["kind"], fault["point"]), []).append(fault)
    cells = []
    for (kind, point), faults in rows.items():
        recoveries_s = [
            fault["whole_at"] - fault["cleared_at"]
            for fault in faults
            if fault["part"] == "in turn" and fault["whole_at"]
        ]
        spread = (
            [f"{statistics.median(recoveries_s):.1f} s", f"{max(recoveries_s):.1f} s"] if recoveries_s else ["", ""]
        )
        cells.append([kind, point, len(faults), *spread])
    return table(["fault", "point", "count", "well again, median", "longest"], cells, numbers_from=2)


def _soak(soak: _Document) -> str:
    text = _SOAK.format(minutes=soak["minutes"], count=len(soak["faults"]))
    # the process that lived longest comes first
    longest = soak["growth"][:1]
    rows = [
        [
            grown["seat"],
            f"{grown['minutes']:.0f}",
            f"{grown['rss_first_mb']:.1f} → {grown['rss_last_mb']:.1f} MB",
            f"{grown['rss_mb_per_hour']:+.2f} MB/h",
            grown["thread_range"],
            grown["descriptor_range"],
        ]
        for grown in longest
    ]
    head = [
        "worker",
        "minutes",
        "memory, first → last",
        "slope (least squares)",
        "threads, max - min",
        "descriptors, max - min, with all that faults closed",
    ]
    levels = "".join(_levels(grown) for grown in longest)
    picture = _SOAK_PICTURE if soak["samples"] else ""
    # what a person found out about the run since, put into its file by hand
    remark = f"\n{soak['remark']}\n" if "remark" in soak else ""
    return text + "\n" + table(head, rows) + levels + picture + remark


def _levels(grown: _Document) -> str:
    def write(levels: Sequence[int]) -> str:
        steps = ", ".join(str(level) for level in levels)
        return f"{levels[0]} → {levels[-1]}, max - min **{max(levels) - min(levels)}** ({steps})"

    return _LEVELS.format(
        threads=write(grown["thread_levels"]),
        descriptors=write(grown["descriptor_levels"]),
        memory=", ".join(f"{level:.1f}" for level in grown["rss_levels_mb"]),
    )


def _machine(runs: Sequence[_Document], soak: _Document | None) -> str:
    columns = _columns(runs, soak)
    rows: list[list[object]] = [
        ["date", *(each["date"] for each in columns)],
        ["minutes", *(f"{each['minutes']:.0f}" for each in columns)],
        ["seed", *(each["plan"]["seed"] for each in columns)],
        ["Redis", *(each["versions"]["Redis"] for each in columns)],
        ["inference_worker", *(each["versions"]["inference_worker"] for each in columns)],
    ]
    for fact in ("CPU", "memory", "kernel", "Python"):
        rows.append([fact, *(each["machine"][fact] for each in columns)])
    settings = ", ".join(f"`{name}={value}`" for name, value in columns[0]["settings"].items())
    return table(["", *map(_name, columns)], rows) + f"\nWhat is not at its default: {settings}, `USAGE_OUTBOX_PATH`.\n"
