"""Usage events in a file: there before the ack, gone when accepted, and there again after a kill."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from inference_worker.documents import UsageData, UsageEvent
from inference_worker.errors import OutboxUnusable
from inference_worker.metrics_buffer import MetricsBuffer
from inference_worker.usage_outbox import UsageOutbox


def event(number: int) -> UsageEvent:
    data = UsageData(
        request_id=f"r{number}",
        deployment_id="d",
        replica_id="replica",
        user_id="u",
        org_id="",
        model="m",
        prompt_tokens=number,
        completion_tokens=1,
        total_tokens=number + 1,
        cached_tokens=None,
    )
    return UsageEvent(1_780_000_000.25 + number, data)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "usage.db")


def reopen(outbox: UsageOutbox, path: str) -> UsageOutbox:
    outbox._file.close()
    return UsageOutbox(path)


def test_events_that_were_not_accepted_are_there_for_the_next_worker_in_order(path: str) -> None:
    outbox = UsageOutbox(path)
    buffer = MetricsBuffer(max_records=1, outbox=outbox)
    for number in range(3):
        buffer.append_usage(event(number))
    buffer.drop_usage(buffer.peek_usage(1))
    again = MetricsBuffer(max_records=1, outbox=reopen(outbox, path))
    assert again.peek_usage(10) == [event(1), event(2)]


def test_accepted_events_do_not_come_back(path: str) -> None:
    outbox = UsageOutbox(path)
    buffer = MetricsBuffer(max_records=1, outbox=outbox)
    buffer.append_usage(event(1))
    buffer.drop_usage(buffer.peek_usage(1))
    assert reopen(outbox, path).load() == []


def test_events_of_the_worker_before_leave_the_file_when_they_are_accepted(path: str) -> None:
    outbox = UsageOutbox(path)
    outbox.put(event(1))
    outbox = reopen(outbox, path)
    buffer = MetricsBuffer(max_records=1, outbox=outbox)
    buffer.drop_usage(buffer.peek_usage(1))
    assert reopen(outbox, path).load() == []


def test_the_oldest_that_is_dropped_leaves_the_file_too(path: str) -> None:
    outbox = UsageOutbox(path)
    buffer = MetricsBuffer(max_records=1, max_usage_events=1, outbox=outbox)
    buffer.append_usage(event(1))
    buffer.append_usage(event(2))
    assert [found for _, found in reopen(outbox, path).load()] == [event(2)]


def test_r66_what_was_put_survives_a_kill(path: str) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, 'tests/unit');"
        "from test_usage_outbox import UsageOutbox, event;"
        f"UsageOutbox({path!r}).put(event(7)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=30).returncode == -9
    assert [found for _, found in UsageOutbox(path).load()] == [event(7)]


def test_a_file_that_another_worker_has_open_is_refused(path: str) -> None:
    outbox = UsageOutbox(path)
    outbox.put(event(1))
    with pytest.raises(OutboxUnusable, match="a file of its own"):
        UsageOutbox(path)


def test_a_file_that_is_no_database_is_refused(path: str) -> None:
    Path(path).write_text("no database at all, and long enough to be looked at" * 100)
    with pytest.raises(OutboxUnusable):
        UsageOutbox(path)


def test_junk_in_the_file_is_passed_over(path: str) -> None:
    outbox = UsageOutbox(path)
    outbox._file.execute("INSERT INTO usage (event) VALUES (?)", (b"junk",))
    outbox.put(event(1))
    assert [found for _, found in outbox.load()] == [event(1)]


def test_an_event_that_the_disk_does_not_take_is_kept_in_memory_and_said_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = UsageOutbox(path)
    buffer = MetricsBuffer(max_records=1, outbox=outbox)
    outbox._file.execute("DROP TABLE usage")
    for number in range(3):
        buffer.append_usage(event(number))
    assert buffer.usage_depth == 3
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_the_file_is_an_sqlite_database_that_a_person_can_look_into(path: str) -> None:
    outbox = UsageOutbox(path)
    outbox.put(event(1))
    outbox._file.close()
    assert sqlite3.connect(path).execute("SELECT count(*) FROM usage").fetchone() == (1,)
