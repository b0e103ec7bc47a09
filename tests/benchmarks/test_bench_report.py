"""The goals, the tables, the picture and the document of the benchmark, made from results that are made up."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import chart, report
from benchmarks import contender as who
from benchmarks import tables as write
from benchmarks.figures import latency, memory, slots, throughput, workers
from benchmarks.goals import goals, goals_table
from benchmarks.results import Results
from benchmarks.stats import Spread
from benchmarks.tables import Table


@pytest.fixture
def results() -> Results:
    """Three rounds; the second was twice as slow for everybody."""
    made = Results()
    made.facts["CPU"] = "an imaginary one"
    for number, slowness in enumerate((1.0, 2.0, 1.0)):
        for contender, wall_s in ((who.BARE, 0.0008), (who.WORKER, 0.00084), (who.DRAMATIQ, 0.001)):
            made.add(
                throughput.NAME,
                contender.name,
                throughput.case_of(1),
                number,
                wall_s=wall_s * slowness,
                cpu_s=wall_s * slowness * 0.75,
            )
        made.add(
            latency.NAME,
            who.WORKER.name,
            latency.case_of(latency.INSTANT, 1),
            number,
            p50_s=0.001,
            p99_s=0.006 * slowness,
        )
        made.add(slots.NAME, who.WORKER.name, slots.CASE, number, share=0.93, rate=595.0, cpu_s=0.001)
        made.add(workers.NAME, who.WORKER.name, workers.case_of(workers.INSTANT, 1), number, cpu_s=0.001, wall_s=0.001)
        made.add(
            workers.NAME, who.WORKER.name, workers.case_of(workers.INSTANT, 8), number, cpu_s=0.00105, wall_s=0.001
        )
    made.add(memory.NAME, who.WORKER.name, memory.GROWTH, 5000, rss_bytes=1e6)
    made.add(memory.NAME, who.WORKER.name, memory.GROWTH, 50_000, rss_bytes=0.5e6)
    return made


def verdicts(results: Results) -> dict[str, str]:
    return {goal.what: goal.verdict() for goal in goals(results)}


def test_a_slow_round_does_not_move_a_ratio(results: Results) -> None:
    ratio = results.ratio(throughput.NAME, throughput.case_of(1), "wall_s", who.WORKER.name, who.BARE.name)
    assert ratio is not None
    assert (ratio.low, ratio.high) == (pytest.approx(1.05), pytest.approx(1.05))


def test_goals_are_met_missed_or_not_measured(results: Results) -> None:
    found = verdicts(results)
    assert found["time per message, prefetch 1, against the bare loop"] == "met"
    assert found["the same against dramatiq"] == "missed by 5%"
    assert found["the same against Celery"] == "not measured"
    assert found["added latency per request, p50"] == "met"
    assert found["added latency per request, p99"] == "missed by 20%"
    assert found["slots kept busy, 100 ms, prefetch 64"] == "met"
    assert found["CPU per message, 8 workers against 1"] == "met"


def test_a_growth_that_was_not_over_a_million_says_so(results: Results) -> None:
    lines = [goal for goal in goals(results) if "growth" in goal.what]
    assert [goal.what for goal in lines] == ["memory, growth over 50,000 messages (the goal is for a million)"]
    assert lines[0].measured is not None
    assert lines[0].measured.median == 1e6


def test_the_growth_over_a_million_stands_for_the_short_look_and_is_said_to_be_another_run(results: Results) -> None:
    longer = Results()
    longer.facts["growth of the memory"] = "in a run of its own"
    longer.add(memory.NAME, who.WORKER.name, memory.GROWTH, 1_000_000, rss_bytes=2e6)
    memory.take_growth(results, longer)
    assert memory.growth(results) == (1_000_000, 2e6)
    assert "memory, growth over 1,000,000 messages" in verdicts(results)
    assert "in a run of its own" in report.report(results, notes="")


def test_a_figure_that_is_measured_again_stands_for_the_old_one_whole_and_for_no_other(results: Results) -> None:
    again = Results()
    again.add(latency.NAME, who.WORKER.name, latency.case_of(latency.INSTANT, 1), 0, p50_s=0.002)
    again.add(throughput.NAME, who.WORKER.name, throughput.case_of(1), 0, wall_s=9.0)
    results.replace(again, latency.NAME)
    found = verdicts(results)
    assert found["added latency per request, p50"] == "missed by 33%"
    assert found["added latency per request, p99"] == "not measured"
    assert found["time per message, prefetch 1, against the bare loop"] == "met"


def test_every_goal_is_in_the_table_whatever_was_measured() -> None:
    assert len(goals_table(Results()).rows) == len(goals(Results())) == 15


def test_a_table_is_markdown() -> None:
    table = Table("Title", ("", "a"), [["x", "1"]], "How.")
    assert table.to_markdown() == "## Title\n\nHow.\n\n|  | a |\n|---|---:|\n| x | 1 |\n"


def test_a_table_is_text_in_columns() -> None:
    assert Table("Title", ("", "a"), [["long", "1"]]).to_text() == "Title\n        a\n  long  1\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (Spread(0.001, 0.001, 0.001, 1), "1.00"),
        (Spread(0.001, 0.0005, 0.0123, 3), "1.00 (0.50–12.3)"),
        (Spread(0.1234, 0.1, 0.2, 3), "123 (100–200)"),
    ],
)
def test_a_value_is_shown_with_its_spread(value: Spread | None, expected: str) -> None:
    assert write.with_spread(value, write.milliseconds) == expected


def test_the_document_has_the_goals_the_notes_and_the_machine(results: Results) -> None:
    results.notes.append("round 2, Celery: not in time")
    text = report.report(results, notes="Mostly in the kernel.")
    for part in (
        "# Performance",
        "](performance.svg)",
        "## Numbers to reach",
        "## Where the time goes\n\nMostly in the kernel.",
        "## Time per message, instant model, prefetch 1",
        "an imaginary one",
        "- round 2, Celery: not in time",
    ):
        assert part in text
    assert "\n\n\n" not in text


def test_without_notes_there_is_no_empty_section(results: Results) -> None:
    assert "Where the time goes" not in report.report(results, notes="\n")


def test_the_picture_is_well_formed_and_names_everyone(results: Results) -> None:
    drawing = chart.draw(chart.panels(results))
    root = ElementTree.fromstring(drawing)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {who.BARE.name, who.WORKER.name, who.DRAMATIQ.name} <= set(texts)
    widths = [float(element.get("width", "0").rstrip("%")) for element in root.iter() if element.tag.endswith("rect")]
    assert max(widths) <= 860


def test_a_run_of_nothing_still_makes_a_document_and_a_picture() -> None:
    assert report.report(Results(), notes="")
    ElementTree.fromstring(chart.draw(chart.panels(Results())))
