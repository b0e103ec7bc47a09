"""The parts of the fault suite: what the wires understand, what the proxy holds, the table, the numbers, the page."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from devstack.chat_completions import count_tokens, load_request
from devstack.processes import wait_until
from devstack.proxy import Direction
from tests.timeouts import LONG_TIMEOUT_S, SHORT_TIMEOUT_S

from . import growth_chart, report, timeline
from .checker import BAD
from .faults import KINDS
from .journal import Expected
from .load import draft
from .points import Point, Reached, Traps
from .processes_seen import Growth, Sample, by_process, growth, slope, to_rows, windows
from .run import IN_TURN, Outcome, Plan, _document
from .store_log import StoreLog
from .taps import AmqpTap, HttpTap, RedisTap
from .wire_proxy import Event, Link, WireProxy

# -- what the wires understand ----------------------------------------------------------------------------------------

TO_SERVER, TO_CLIENT = Direction.TO_SERVER, Direction.TO_CLIENT


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce"


def method(class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    return frame(1, struct.pack(">HH", class_id, method_id) + arguments)


def content(body: bytes) -> bytes:
    """Return the header and two bodies of a message."""
    header = frame(2, struct.pack(">HHQ", 60, 0, len(body)))
    return header + frame(3, body[:5]) + frame(3, body[5:])


def events(tap: Any, direction: Direction, data: bytes, *, piece_bytes: int) -> list[tuple[str, str, str]]:
    """Feed a tap piece by piece; nothing may be added, lost or reordered."""
    passed, found = b"", []
    for offset in range(0, len(data), piece_bytes):
        for piece, event in tap.split(direction, data[offset : offset + piece_bytes]):
            passed += piece
            if event is not None:
                found.append((event.name, event.request_id, event.detail))
    assert passed == data
    return found


PIECES = pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
BODY = b'{"request_id": "r-1", "payload": {}}'


@PIECES
def test_an_ack_is_known_by_the_request_of_its_tag(piece_bytes: int) -> None:
    tap = AmqpTap()
    deliver = method(60, 60, b"\x03tag" + struct.pack(">Q", 7) + b"\0" + b"\0" + b"\x01q") + content(BODY)
    assert events(tap, TO_CLIENT, deliver, piece_bytes=piece_bytes) == []
    settled = b"AMQP\0\0\x09\x01" + method(60, 80, struct.pack(">Q", 7) + b"\0")
    assert events(tap, TO_SERVER, settled, piece_bytes=piece_bytes) == [("acking", "r-1", "ack")]


@PIECES
@pytest.mark.parametrize(("flags", "meaning"), [(b"\x02", "requeue"), (b"\x00", "reject")])
def test_a_nack_says_whether_the_message_goes_back(piece_bytes: int, flags: bytes, meaning: str) -> None:
    tap = AmqpTap()
    deliver = method(60, 60, b"\x03tag" + struct.pack(">Q", 1) + b"\0" + b"\0" + b"\x01q") + content(BODY)
    events(tap, TO_CLIENT, deliver, piece_bytes=piece_bytes)
    nack = b"AMQP\0\0\x09\x01" + method(60, 120, struct.pack(">Q", 1) + flags)
    assert events(tap, TO_SERVER, nack, piece_bytes=piece_bytes) == [("acking", "r-1", meaning)]


@PIECES
def test_a_copy_is_seen_at_its_last_byte_and_at_its_confirm(piece_bytes: int) -> None:
    tap = AmqpTap()
    start_ok = method(10, 11, b"... inference_worker d r copies ...")
    publish = method(60, 40, b"\0\0\0\x01q\x01") + content(BODY)
    found = events(tap, TO_SERVER, b"AMQP\0\0\x09\x01" + start_ok + publish, piece_bytes=piece_bytes)
    assert (tap.purpose, found) == ("copies", [("publishing", "r-1", "")])
    confirm = method(60, 80, struct.pack(">Q", 1) + b"\0")
    assert events(tap, TO_CLIENT, confirm, piece_bytes=piece_bytes) == [("published", "r-1", "")]


def resp(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


@PIECES
def test_a_result_is_seen_when_it_is_set_and_when_that_took(piece_bytes: int) -> None:
    tap = RedisTap()
    commands = (
        resp(b"HELLO", b"3")
        + resp(b"SET", b"infer_resp:r-1", b"a\r\nb", b"EX", b"9", b"NX")
        + resp(b"SET", b"infer_resp:.probe:w", b"1")
        + resp(b"SET", b"infer_resp:r-2", b"c", b"NX")
        + resp(b"GET", b"infer_resp:r-1")
    )
    found = events(tap, TO_SERVER, commands, piece_bytes=piece_bytes)
    assert found == [("storing", "r-1", ""), ("storing", "r-2", "")]
    replies = (
        b"%1\r\n$5\r\nproto\r\n:3\r\n" + b">2\r\n+x\r\n+y\r\n" + b"+OK\r\n" + b"+OK\r\n" + b"_\r\n" + b"$1\r\nc\r\n"
    )
    assert events(tap, TO_CLIENT, replies, piece_bytes=piece_bytes) == [("stored", "r-1", "")]


@PIECES
def test_a_call_is_seen_when_its_last_byte_has_passed(piece_bytes: int) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nX-Request-Id: r-1-0a1b2c3d\r\nContent-Length: 4\r\n\r\n"
    probe = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
    found = events(HttpTap(), TO_SERVER, head + b"body" + probe + head + b"bod", piece_bytes=piece_bytes)
    assert found == [("calling", "r-1", "r-1-0a1b2c3d")]


# -- what the proxy holds ---------------------------------------------------------------------------------------------


class LineTap:
    """Each byte "!" is an event."""

    def split(self, direction: Direction, data: bytes) -> Iterator[tuple[bytes, Event | None]]:
        for index in range(len(data)):
            byte = data[index : index + 1]
            yield byte, Event("mark", detail=direction.value) if byte == b"!" else None


@pytest.fixture
def peer() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_TIMEOUT_S)
        yield listener


def connect(proxy: WireProxy, peer: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S)
    server, _ = peer.accept()
    server.settimeout(LONG_TIMEOUT_S)
    return client, server


def receive_all(sock: socket.socket, received: list[bytes]) -> None:
    while data := sock.recv(10):
        received.append(data)


def test_nothing_passes_an_event_while_it_is_held_and_what_came_before_has_passed(peer: socket.socket) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold(link: Link, event: Event) -> bool:
        held.set()
        return let_go.wait(LONG_TIMEOUT_S)

    with WireProxy(peer.getsockname()[1], make_tap=LineTap, on_event=hold) as proxy:
        client, server = connect(proxy, peer)
        with client, server:
            client.sendall(b"ab!cd")
            assert held.wait(LONG_TIMEOUT_S)
            assert server.recv(10) == b"ab"
            server.settimeout(SHORT_TIMEOUT_S)
            with pytest.raises(TimeoutError):
                server.recv(10)
            let_go.set()
            server.settimeout(LONG_TIMEOUT_S)
            assert server.recv(10) == b"!cd"


def test_what_is_dropped_at_an_event_never_arrives_and_both_sides_are_reset(peer: socket.socket) -> None:
    with WireProxy(peer.getsockname()[1], make_tap=LineTap, on_event=lambda link, event: False) as proxy:
        client, server = connect(proxy, peer)
        with client, server:
            client.sendall(b"ab!cd")
            received: list[bytes] = []
            with pytest.raises(ConnectionResetError):
                receive_all(server, received)
            assert b"".join(received) in (b"", b"ab")  # a reset may throw away what came before it
            with pytest.raises(ConnectionResetError):
                client.recv(1)


def test_a_stalled_link_passes_nothing_closes_nothing_and_goes_on_where_it_was(peer: socket.socket) -> None:
    with WireProxy(peer.getsockname()[1], make_tap=LineTap, on_event=lambda link, event: True) as proxy:
        client, server = connect(proxy, peer)
        with client, server:
            proxy.stall()
            client.sendall(b"x")
            server.settimeout(SHORT_TIMEOUT_S)
            with pytest.raises(TimeoutError):
                server.recv(1)
            proxy.resume()
            server.settimeout(LONG_TIMEOUT_S)
            assert server.recv(1) == b"x"


def test_a_proxy_that_refuses_ends_its_links_and_takes_new_ones_when_it_starts_again(peer: socket.socket) -> None:
    with WireProxy(peer.getsockname()[1], make_tap=LineTap, on_event=lambda link, event: True) as proxy:
        client, server = connect(proxy, peer)
        with client, server:
            proxy.refuse()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", proxy.port), timeout=LONG_TIMEOUT_S)
        proxy.start()
        client, server = connect(proxy, peer)
        with client, server:
            server.sendall(b"y")
            assert client.recv(1) == b"y"


# -- traps ------------------------------------------------------------------------------------------------------------


def test_a_trap_springs_once_at_its_point_and_on_its_workers_only() -> None:
    traps, sprung = Traps(), []

    def act(reached: Reached) -> bool:
        sprung.append(reached.request_id)
        return False

    trap = traps.set(Point.STORED, ["w2"], act)
    assert traps.pass_by(Point.ACKING, "w2", "a")
    assert traps.pass_by(Point.STORED, "w1", "b")
    assert not traps.pass_by(Point.STORED, "w2", "c")
    assert traps.pass_by(Point.STORED, "w2", "d")
    assert sprung == ["c"]
    reached = trap.wait(0)
    assert reached is not None
    assert (reached.seat, reached.request_id) == ("w2", "c")


def test_a_trap_that_was_removed_does_not_spring() -> None:
    traps = Traps()
    traps.remove(traps.set(Point.STORED, ["w"], lambda reached: False))
    assert traps.pass_by(Point.STORED, "w", "a")


# -- the table --------------------------------------------------------------------------------------------------------


def test_there_are_thirty_kinds_of_fault_at_least_and_no_row_twice() -> None:
    rows = [(kind.name, kind.point) for kind in KINDS]
    assert len(rows) == len(set(rows)) >= 30


@pytest.mark.parametrize("name", ["worker: SIGKILL", "worker's AMQP link: cut", "worker's AMQP link: stalled"])
@pytest.mark.parametrize("point", Point)
def test_kill_cut_and_stall_strike_at_every_point(name: str, point: Point) -> None:
    assert any(kind.name.startswith(name) and kind.point is point for kind in KINDS)


def test_most_of_a_run_comes_in_turn_and_each_kind_is_in_it() -> None:
    assert round(200 * IN_TURN) >= 2 * len(KINDS)
    assert Plan("faults", 1).kinds() == list(KINDS)


# -- the load ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_count", [5, 50])
def test_the_right_answer_follows_from_the_request(token_count: int) -> None:
    item = draft("r-0000001", Expected.COMPLETED, model="m", token_count=token_count)
    (payload,) = re.findall(rb'"payload": (\{.*\})\}$', item.body)
    request = load_request(payload, known_models=frozenset(), context_tokens=1000)
    assert item.text == f"You said: {request.text}"
    assert count_tokens(item.text) == token_count
    assert item.total_tokens == request.prompt_tokens + token_count


# -- Redis' file ------------------------------------------------------------------------------------------------------


def test_the_writes_are_read_in_order_also_over_a_torn_end_and_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "appendonly.aof.1.incr.aof"
    first = resp(b"SET", b"infer_resp:a", b"1", b"PXAT", b"9")
    second = resp(b"SET", b"infer_resp:b", b"2")
    path.write_bytes(b"#TS:1\r\n" + resp(b"SELECT", b"0") + first + second[:9])
    log = StoreLog(tmp_path).start()
    try:
        wait_until(lambda: log.is_answered("a"), timeout_s=LONG_TIMEOUT_S, what="the first write")
        # a killed Redis cuts the torn command off, and goes on behind the whole ones
        path.write_bytes(path.read_bytes()[: -len(second[:9])] + second)
        wait_until(lambda: log.is_answered("b"), timeout_s=LONG_TIMEOUT_S, what="the second write")
        later = tmp_path / "appendonly.aof.10.incr.aof"
        later.write_bytes(resp(b"SET", b"infer_resp:c", b"3", b"PXAT", b"9"))
        wait_until(lambda: log.is_answered("c"), timeout_s=LONG_TIMEOUT_S, what="the write in the next file")
        assert [(each.request_id, each.has_ttl) for each in log.writes] == [("a", True), ("b", False), ("c", True)]
    finally:
        log.close()


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_the_slope_is_that_of_the_least_squares_line() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    assert slope([(0, 0), (1, 1), (2, 0)]) == pytest.approx(0)


def test_growth_is_measured_over_the_last_half() -> None:
    samples = [
        Sample(at=second, seat="w", process_id=1, rss_bytes=rss, threads=threads, descriptors=20)
        for second, rss, threads in [
            (0, 10_000_000, 5),
            (1800, 50_000_000, 9),
            (2700, 50_500_000, 9),
            (3600, 51_000_000, 8),
        ]
    ]
    found = growth(samples)
    assert found is not None
    assert found.rss_mb_per_hour == pytest.approx(2.0)
    assert (found.thread_range, found.descriptor_range, found.minutes) == (1, 0, 30)


def seen(
    *, minutes: int = 60, seat: str = "worker-1", at: float = 1000.0, **numbers: Mapping[int, int] | int
) -> list[Sample]:
    """Return a sample every ten seconds; a number is constant, or changes at a second of its own."""
    usual = {"rss_bytes": 60_000_000, "threads": 14, "descriptors": 46}
    samples = []
    for second in range(0, minutes * 60 + 1, 10):
        for name, number in numbers.items():
            usual[name] = number if isinstance(number, int) else number.get(second, usual[name])
        samples.append(Sample(at=at + second, seat=seat, process_id=1, **usual))
    return samples


def grown(samples: list[Sample]) -> Growth:
    found = growth(samples)
    assert found is not None
    return found


def test_descriptors_that_drop_or_rise_for_a_moment_do_not_change_the_level() -> None:
    found = grown(seen(descriptors={0: 46, 2000: 12, 2050: 46, 2500: 48, 2510: 46, 3300: 20, 3350: 46}))
    assert found.descriptor_range == 36
    assert found.descriptor_levels == [46] * 6


def test_what_leaks_lifts_one_level_after_the_other() -> None:
    rising = {second: 10 + second // 300 for second in range(0, 3600, 300)}
    found = grown(seen(threads=rising, descriptors={**rising, 1950: 5, 2050: 17}, rss_bytes={2700: 64_000_000}))
    assert found.thread_levels == [16, 17, 18, 19, 20, 21]
    assert found.descriptor_levels == [16, 17, 18, 19, 20, 21]
    assert found.rss_levels_mb == [60, 60, 60, 64, 64, 64]


def test_the_level_of_the_memory_is_no_single_peak() -> None:
    assert grown(seen(rss_bytes={2400: 90_000_000, 2410: 60_000_000})).rss_levels_mb == [60] * 6


@pytest.mark.parametrize(("minutes", "count"), [(4, 1), (19, 1), (20, 2), (44, 4), (60, 6)])
def test_the_windows_are_the_last_half_and_the_last_one_takes_the_remainder(minutes: int, count: int) -> None:
    samples = seen(minutes=minutes)
    parts = windows([sample.at for sample in samples])
    assert len(parts) == count
    assert [index for part in parts for index in part] == list(range(len(samples) // 2, len(samples)))
    # thirty samples in five minutes
    assert all(len(part) == 30 for part in parts[:-1])
    assert len(parts[-1]) >= min(30, len(samples) // 2)


def test_five_minutes_in_which_nothing_was_seen_have_no_level() -> None:
    samples = [sample for sample in seen() if not 2400 < sample.at - 1000 < 3100]
    assert len(grown(samples).thread_levels) == 5


def test_a_soak_keeps_the_samples_of_who_lived_longest_and_other_runs_keep_none() -> None:
    brief, long = seen(minutes=20, seat="worker-2"), seen(minutes=30, at=1600.0, threads=15)
    outcome = Outcome(samples=sorted([*brief, *long], key=lambda sample: sample.at), begun_at=1000.0, ended_at=3400.0)
    assert by_process(outcome.samples) == [long, brief]
    soak, run = (
        _document(Plan("p", 1, is_soak=is_soak), outcome, broker_version="4", store_version="7")
        for is_soak in (True, False)
    )
    assert soak["samples"] == to_rows(long, begun_at=1000.0)
    assert (soak["samples"][0], soak["samples"][-1]) == ((10.0, 60.0, 15, 46), (40.0, 60.0, 15, 46))
    assert [found["seat"] for found in soak["growth"]] == ["worker-1", "worker-2"]
    assert run["samples"] == []


# -- the page and its pictures ----------------------------------------------------------------------------------------


def document(**changes: Any) -> dict[str, Any]:
    """Return what a run of two faults leaves."""
    kinds = [("broker: kill -9 and restart", ""), ("worker: SIGKILL", Point.STORED.value)]
    faults = [
        {
            "number": number,
            "kind": kind,
            "point": point,
            "part": "in turn",
            "seat": "worker-1",
            "begun_at": 1020.0 + 10 * number,
            "cleared_at": 1024.0 + 10 * number,
            "whole_at": 1026.5 + 10 * number,
        }
        for number, (kind, point) in enumerate(kinds, start=1)
    ]
    plan = {"seed": 77, "queue_type": "classic", "is_soak": False, "is_quick": False, "per_second": 60.0}
    counts = dict.fromkeys(
        ("requests", "streamed", "must_fail", "model_calls", "usage_events_repeated_under_the_same_id"), 1234
    )
    return {
        "plan": plan,
        "date": "2026-01-02",
        "minutes": 2.0,
        "begun_at": 1000.0,
        "versions": {"inference_worker": "1", "RabbitMQ": "3.10.8", "Redis": "7"},
        "machine": {"CPU": "c", "memory": "m", "kernel": "k", "Python": "p"},
        "settings": {"RABBITMQ_PREFETCH": "16"},
        "bad": dict.fromkeys(BAD, 0),
        "bad_meanings": BAD,
        "counts": {**counts, "requests_without_a_final_record": 5, "dead_letters_lost_by_the_killed_broker": 0},
        "repeated_calls": {"the model failed": 3},
        "faults": faults,
        "throughput": [(second, 60, 60 if second % 40 else 200) for second in range(120)],
        "growth": [],
        "samples": [],
        "standstills": [],
        **changes,
    }


def test_the_page_shows_every_counter_of_every_run() -> None:
    page = report.render([document(bad={**dict.fromkeys(BAD, 0), "lost": 9876})], None)
    assert "**9876**" in page
    for name, meaning in BAD.items():
        assert f"{name.replace('_', ' ')}: {meaning}" in page
    assert f"| worker: SIGKILL | {Point.STORED.value} | 1 | 2.5 s | 2.5 s |" in page


def soak_of(samples: list[Sample], **changes: Any) -> dict[str, Any]:
    """Return what a soak leaves, after its way through a file."""
    plan = {**document()["plan"], "is_soak": True}
    made = document(growth=[asdict(grown(samples))], samples=to_rows(samples, begun_at=1000.0), plan=plan, **changes)
    loaded: dict[str, Any] = json.loads(json.dumps(made))
    return loaded


LEAKING = seen(
    rss_bytes={second: 60_000_000 + second * 1000 for second in range(0, 3601, 10)},
    threads={2000: 15},
    descriptors={2000: 12, 2050: 46, 3000: 48},
)


def test_a_soak_has_its_growth_on_the_page() -> None:
    page = report.render([document()], soak_of(LEAKING, remark="Found out since."))
    assert "| worker-1 | 30 | 61.8 → 63.6 MB | +3.60 MB/h | 1 | 36 |" in page
    assert "threads: 14 → 15, max - min **1** (14, 15, 15, 15, 15, 15)" in page
    assert "descriptors: 46 → 48, max - min **2** (46, 46, 46, 46, 48, 48)" in page
    assert "\nFound out since.\n" in page


def test_the_page_of_a_soak_is_about_who_lived_longest() -> None:
    soak = soak_of(LEAKING)
    soak["growth"].append(asdict(grown(seen(minutes=20, seat="worker-2"))))
    page = report.render([document()], soak)
    assert "| worker-1 | 30 |" in page
    assert "worker-2" not in page


SOAK_PICTURE = "reliability-soak.svg"


def write_page(tmp_path: Path, soak: dict[str, Any] | None) -> str:
    """Write the page of a run, and of a soak if there is one."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    for folder in (results, docs):
        folder.mkdir()
    (results / "4-classic.json").write_text(json.dumps(document()))
    if soak is not None:
        (results / "soak.json").write_text(json.dumps(soak))
    report.write(results, docs)
    assert (docs / "reliability-timeline.svg").exists()
    page = (docs / "reliability.md").read_text()
    assert (docs / SOAK_PICTURE).exists() == (SOAK_PICTURE in page)
    return page


def test_the_page_shows_the_picture_of_a_soak_in_its_section(tmp_path: Path) -> None:
    page = write_page(tmp_path, soak_of(LEAKING))
    assert page.index("## A soak") < page.index(f"]({SOAK_PICTURE})") < page.index("## What it ran on")


@pytest.mark.parametrize("soak", [None, {**soak_of(LEAKING), "samples": []}], ids=["no soak", "no samples"])
def test_the_page_refers_to_no_picture_without_a_soak_that_has_samples(
    tmp_path: Path, soak: dict[str, Any] | None
) -> None:
    assert SOAK_PICTURE not in write_page(tmp_path, soak)


def texts_inside(root: ElementTree.Element) -> list[str]:
    """Return all texts; each must be within the picture, as wide as its letters may be."""
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = []
    for element in root.iter():
        if element.tag.endswith("text"):
            text, look = element.text or "", element.get("class")
            text_width = len(text) * (9 if look == "title" else 7)
            left = float(element.attrib["x"]) - text_width * {"right": 1.0, "middle": 0.5}.get(look or "", 0.0)
            assert 0 <= left <= left + text_width <= width, text
            assert 12 <= float(element.attrib["y"]) <= height - 4, text
            texts.append(text)
    return texts


def lines_of(root: ElementTree.Element, look: str) -> list[list[tuple[float, float]]]:
    """Return the corners (x, y) of each line of a class."""
    return [
        [(float(x), float(y)) for x, y in (corner.split(",") for corner in element.attrib["points"].split())]
        for element in root.iter()
        if element.get("class") == look and element.tag.endswith("polyline")
    ]


def test_the_picture_is_well_formed_and_its_texts_are_inside() -> None:
    root = ElementTree.fromstring(timeline.draw(document()))
    assert len(texts_inside(root)) > 10


def test_the_picture_of_a_soak_shows_three_plots_one_below_the_other() -> None:
    root = ElementTree.fromstring(growth_chart.draw(soak_of(LEAKING)["samples"]))
    texts = texts_inside(root)
    for name in ("Memory", "Threads", "Descriptors"):
        assert sum(text.startswith(name) for text in texts) == 1
    assert any("+3.60 MB an hour" in text for text in texts)
    assert "60" in texts  # the last minute
    plots = lines_of(root, "seen")
    assert [len(plot) for plot in plots] == [len(LEAKING)] * 3
    bands = [(min(y for _, y in plot), max(y for _, y in plot)) for plot in plots]
    assert bands[0][1] < bands[1][0] <= bands[1][1] < bands[2][0]
    # up is more: the memory rises all the time, the descriptors dropped at 2000 s
    assert plots[0][0][1] > plots[0][-1][1]
    assert plots[2][200][1] > plots[2][0][1] > plots[2][-1][1]


def test_the_last_half_is_shaded_and_what_is_measured_is_drawn_in_it() -> None:
    root = ElementTree.fromstring(growth_chart.draw(soak_of(LEAKING)["samples"]))
    shades = [element for element in root.iter() if element.get("class") == "half"]
    memory, threads, descriptors = lines_of(root, "measured")
    plots = lines_of(root, "seen")
    half = len(LEAKING) // 2
    for shade, plot, measured in zip(shades, plots, (memory, threads, descriptors), strict=True):
        begin = float(shade.attrib["x"])
        assert (begin, begin + float(shade.attrib["width"])) == pytest.approx((plot[half][0], plot[-1][0]))
        assert (measured[0][0], measured[-1][0]) == (plot[half][0], plot[-1][0])
        assert all(
            float(shade.attrib["y"]) <= y <= float(shade.attrib["y"]) + float(shade.attrib["height"])
            for _, y in measured
        )
    # a memory that rises evenly is its own least-squares line, and the descriptors that dropped left their level alone
    assert memory == [pytest.approx(plots[0][half], abs=0.2), pytest.approx(plots[0][-1], abs=0.2)]
    assert {y for _, y in descriptors} == {plots[2][0][1], plots[2][-1][1]}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_soak_of_seconds_has_a_picture_too(count: int) -> None:
    root = ElementTree.fromstring(growth_chart.draw(to_rows(LEAKING[:count], begun_at=990.0)))
    assert texts_inside(root)


def test_quick_runs_are_no_evidence(tmp_path: Path) -> None:
    for name in ("quick-3.10.8-classic", "3.10.8-classic", "soak"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    runs, soak = report.load(tmp_path)
    assert [run["name"] for run in runs] == ["3.10.8-classic"]
    assert soak == {"name": "soak"}
