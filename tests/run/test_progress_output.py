"""Progress output that is closed or full, and a live display that a signal interrupts."""

from __future__ import annotations

import contextlib
import io
import os

import pytest

from titan_rl.run.observability.progress import Progress, ShownStep
from titan_rl.run.observability.step_metrics import shown_step


def show_run(descriptor: int) -> None:
    file = os.fdopen(descriptor, "w")
    try:
        with Progress(10, file) as progress:
            for step in (1, 2):
                progress.message("hello")
                progress.step(ShownStep(step, 1.0, ("reward", 0.5, "")))
    finally:
        with contextlib.suppress(OSError):  # flushing the rest of the buffer
            file.close()


def test_closed_output_pipe_is_ignored():
    read, write = os.pipe()
    os.close(read)
    show_run(write)


def test_full_output_disk_is_ignored():
    show_run(os.open("/dev/full", os.O_WRONLY))


def test_high_error_rate_is_shown_next_to_the_reward():
    output = io.StringIO()
    metrics = {"rollout/reward_mean": 0.5, "throughput/tokens_per_s": 100.0, "time/step_s": 1.0}
    many = {"rollout/finished_reward_mean": 0.75, "rollout/finished_errors": 65.0, "rollout/finished_rollouts": 100.0}
    few = {"rollout/finished_reward_mean": 0.5, "rollout/finished_errors": 1.0, "rollout/finished_rollouts": 100.0}
    faults = many | {"rollout/finished_fault_fraction": 0.5}
    with Progress(10, output) as progress:
        progress.step(shown_step(1, metrics | many))
        progress.step(shown_step(2, metrics | few))
        progress.step(shown_step(3, metrics | faults))
    first, second, third = output.getvalue().splitlines()
    assert "reward 0.750 (trained on 0.500; 65% ended in an error)" in first
    assert "error" not in second
    assert "reward 0.750 (trained on 0.500; 65% ended in an error; 50% left out as faults)" in third


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_interrupt_ends_the_live_display_and_later_output_is_plain(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(10, terminal) as progress:
        progress.step(ShownStep(1, 1.0, ("reward", 0.5, "")))
        assert "\x1b[?25l" in terminal.getvalue(), "the live display hides the cursor"
        progress.end_with("stopping")
        assert terminal.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
        progress.step(ShownStep(2, 1.0, ("reward", 0.75, " (trained on 0.500)")))
    assert capfd.readouterr().err == "titan-rl: stopping\n"
    assert "step  2/10  reward 0.750 (trained on 0.500)" in terminal.getvalue()
