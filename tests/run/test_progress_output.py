"""An output that nobody reads, or that has no room, and a display that a signal interrupts."""

from __future__ import annotations

import contextlib
import io
import os

import pytest

from titan_rl.run.observability.progress import Progress, StepReport


def show_a_run(descriptor: int) -> None:
    file = os.fdopen(descriptor, "w")
    try:
        with Progress(10, file) as progress:
            for step in (1, 2):
                progress.message("hello")
                progress.step(StepReport(step, 0.5, 0.5, 100.0, 0.0, 1.0))
    finally:
        with contextlib.suppress(OSError):  # of what its buffer holds still
            file.close()


def test_output_that_nobody_reads_ends_nothing():
    read, write = os.pipe()
    os.close(read)
    show_a_run(write)


def test_output_to_a_full_disk_ends_nothing():
    show_a_run(os.open("/dev/full", os.O_WRONLY))


def test_errors_that_are_not_few_stand_beside_the_reward():
    said = io.StringIO()
    with Progress(10, said) as progress:
        progress.step(StepReport(1, 0.75, 0.5, 100.0, 0.0, 1.0, errors=0.65))
        progress.step(StepReport(2, 0.5, 0.5, 100.0, 0.0, 1.0, errors=0.01))
    first, second = said.getvalue().splitlines()
    assert "reward 0.750 (trained on 0.500; 65% ended in an error)" in first
    assert "error" not in second


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_interruption_ends_the_live_display_and_what_follows_is_plain(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(10, terminal) as progress:
        progress.step(StepReport(1, 0.5, 0.5, 100.0, 0.0, 1.0))
        assert "\x1b[?25l" in terminal.getvalue(), "the live display hides the cursor"
        progress.end_with("stopping")
        assert terminal.getvalue().rstrip().endswith("\x1b[?25h"), "it is shown again"
        progress.step(StepReport(2, 0.75, 0.5, 100.0, 0.0, 1.0))
    assert capfd.readouterr().err == "titan-rl: stopping\n"
    assert "step  2/10  reward 0.750 (trained on 0.500)" in terminal.getvalue()
