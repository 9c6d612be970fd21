"""Line that an idle terminal shows while a command imports what it needs."""

from __future__ import annotations

import io
import threading

import pytest

from titan_rl.run.terminal.waiting import WaitingLine

ERASE = "\r\x1b[K"


class Terminal(io.StringIO):
    """Terminal that signals when something is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def test_idle_terminal_shows_the_waiting_line_until_the_end(terminal: Terminal):
    with WaitingLine(terminal, after_s=0.0).shown("checking the settings"):
        assert terminal.written.wait(60)
    assert terminal.getvalue() == f"{ERASE}titan-rl: checking the settings ...{ERASE}"


def test_waiting_line_makes_room_for_other_output_and_returns(terminal: Terminal):
    line = WaitingLine(terminal, after_s=3600.0)
    with line.shown("checking the settings"):
        line.draw()
        line.erase()
        terminal.write("a warning\n")
        line.draw()
    drawn = f"{ERASE}titan-rl: checking the settings ...{ERASE}"
    assert terminal.getvalue() == f"{drawn}a warning\n{drawn}"


def test_short_wait_shows_no_waiting_line(terminal: Terminal):
    with WaitingLine(terminal, after_s=3600.0).shown("checking the settings"):
        pass
    assert terminal.getvalue() == ""


def test_inner_block_replaces_the_waiting_line(terminal: Terminal):
    line = WaitingLine(terminal, after_s=3600.0)
    with line.shown("outer"), line.shown("inner"):
        line.draw()
    assert terminal.getvalue() == f"{ERASE}titan-rl: inner ...{ERASE}"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_dumb_terminal_shows_no_waiting_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, term: str):
    monkeypatch.setenv("TERM", term)
    line = WaitingLine(terminal, after_s=0.0)
    with line.shown("checking the settings"):
        line.draw()
    assert terminal.getvalue() == ""
