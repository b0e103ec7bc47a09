"""The output is drawn where a person watches, and plain lines in a log."""

from __future__ import annotations

import io

import pytest

from devstack.terminal import ProgressBar, Terminal


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colours_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def draw(stream: io.StringIO) -> str:
    terminal = Terminal(stream)
    bar = ProgressBar(terminal, 30, what="done")
    for done in range(31):
        bar.show(done)
        bar.show(done)
    terminal.table(["#", "name"], [["1", "a"], ["10", "b"]], colours=["red", ""])
    return stream.getvalue()


def test_a_log_gets_few_lines_no_colours_and_no_carriage_returns() -> None:
    text = draw(io.StringIO())
    assert "\r" not in text
    assert "\x1b" not in text
    assert text.splitlines()[:4] == ["  0 of 30 done", "  10 of 30 done", "  20 of 30 done", "  30 of 30 done"]


def test_a_terminal_gets_a_bar_drawn_over_itself_and_colours() -> None:
    text = draw(Screen())
    assert text.count("\r") == 31
    assert "\x1b[31m" in text


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in draw(Screen())


def test_numbers_are_set_to_the_right() -> None:
    assert "   1  a\n  10  b\n" in draw(io.StringIO())
