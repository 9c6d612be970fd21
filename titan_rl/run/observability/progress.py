"""What a person sees while a run goes on: a live display on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from titan_rl.run.directory import read_jsonl
from titan_rl.run.machine.stop_signals import tell_on_stderr
from titan_rl.run.observability.standard_streams import silence

logger = logging.getLogger(__name__)

_BLOCKS = "▁▂▃▄▅▆▇█"
_TOLD_ERRORS = 0.05  # share of the rollouts
_ETA_STEPS = 10  # the time left is estimated from this many last steps


class ShownStep(Protocol):
    """One finished step, as the display shows it."""

    @property
    def step(self) -> int:
        """From 1."""
        ...

    @property
    def seconds(self) -> float: ...

    @property
    def curve(self) -> tuple[str, float, str]:
        """What is looked at most: its name, its value, and a note to it, which may be empty."""
        ...

    @property
    def figures(self) -> Mapping[str, str]:
        """The rest, by name."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """Of a step of reinforcement learning."""

    step: int  # from 1
    reward: float  # mean over the rollouts that it was trained on and those that were dropped
    reward_trained: float  # mean over those that the step was trained on
    tokens_per_second: float  # completion tokens
    staleness: float | None  # mean over the trained tokens, where the trainer says it
    seconds: float
    errors: float = 0.0  # share of all those rollouts that ended in an error

    @property
    def curve(self) -> tuple[str, float, str]:
        notes = [f"trained on {self.reward_trained:.3f}"] if abs(self.reward - self.reward_trained) >= 0.0005 else []
        notes += [f"{self.errors:.0%} ended in an error"] if self.errors >= _TOLD_ERRORS else []
        return "reward", self.reward, f" ({'; '.join(notes)})" if notes else ""

    @property
    def figures(self) -> Mapping[str, str]:
        staleness = {} if self.staleness is None else {"staleness": f"{self.staleness:.1f}"}
        return {"tokens/s": f"{self.tokens_per_second:6.0f}", **staleness}


class ShownSummary(Protocol):
    """What is said of a finished run."""

    @property
    def rows(self) -> Mapping[str, str]:
        """By their labels."""
        ...

    @property
    def achieved(self) -> str | None:
        """The label of the row to be glad of, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A finished run. The rewards are of the same held-out samples; None where validation is off."""

    reward_before: float | None
    reward_after: float | None
    steps: int
    tokens: int  # completion tokens trained on
    seconds: float
    run_dir: Path

    @property
    def rows(self) -> Mapping[str, str]:
        return {
            "validation reward": _validated(self.reward_before, self.reward_after),
            "steps": f"{self.steps:,}",
            "tokens": f"{self.tokens:,}",
            "time": format_seconds(self.seconds),
            "policy": f"{self.run_dir / 'export'}",
            "report": f"{self.run_dir / 'report.html'}",
        }

    @property
    def achieved(self) -> str | None:
        before, after = self.reward_before, self.reward_after
        return "validation reward" if before is not None and after is not None and after > before else None

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step's rollouts, also of steps before the run was resumed."""
        rewards: dict[int, float] = {}
        for record in read_jsonl(self.run_dir / "metrics.jsonl"):
            reward = record.get("rollout/finished_reward_mean", record.get("rollout/reward_mean"))
            if isinstance(reward, int | float):
                rewards[record["step"]] = reward
        return [reward for _, reward in sorted(rewards.items())]


class _Console(Console):
    """Falls silent where nobody reads any more, or the disk is full: that ends no run."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            self._fall_silent(error)

    def on_broken_pipe(self) -> None:
        self._fall_silent(BrokenPipeError("nobody reads the output"))

    def _fall_silent(self, error: OSError) -> None:
        self.quiet = True
        logger.warning("the output cannot be written, and the run goes on without it: %r", error)
        if self.file is sys.stdout:
            silence(sys.stdout)


class Progress:
    """Shows a run. A context manager; `message` and `summary` also work before and after.

    Args:
        total_steps: of the run.
        file: where to write; by default standard output.

    Example, elsewhere than on a terminal:

        step   3/100  reward 0.512  tokens/s  21034  staleness 0.8  1.92 s
    """

    def __init__(self, total_steps: int, file: TextIO | None = None) -> None:
        self._total = total_steps
        self._console = _Console(file=file or sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._last: ShownStep | None = None
        self._values: list[float] = []
        self._durations: deque[float] = deque(maxlen=_ETA_STEPS)

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def message(self, text: str) -> None:
        """One line of text, above the live display."""
        self._console.print(Text(text, style="dim" if self._live else ""))

    def end_with(self, text: str) -> None:
        """One line on standard error, for which the live display ends. Callable from a signal handler."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        tell_on_stderr(text)

    def step(self, report: ShownStep) -> None:
        """Show a finished step."""
        name, value, note = report.curve
        self._last = report
        self._values.append(value)
        self._durations.append(report.seconds)
        if self._live is not None:
            self._live.update(self._render())
            return
        width = len(str(self._total))
        figures = "  ".join(f"{label} {figure}" for label, figure in report.figures.items())
        self._console.print(
            f"step {report.step:>{width}}/{self._total}  {name} {value:.3f}{note}  {figures}  {report.seconds:.2f} s"
        )

    def summary(self, summary: ShownSummary) -> None:
        """The closing table."""
        label_width = max(map(len, summary.rows))
        self._console.print()
        for label, value in summary.rows.items():
            style = "bold green" if label == summary.achieved else ""
            self._console.print(Text.assemble((f"{label:<{label_width}}  ", "dim"), (value, style)))

    def _render(self) -> Group:
        done = self._last.step if self._last else 0
        bar = Table.grid(padding=(0, 1), expand=False)
        left = fmean(self._durations) * (self._total - done) if self._durations else math.nan
        bar.add_row(
            Text(f"step {done}/{self._total}", style="bold"),
            ProgressBar(total=max(self._total, 1), completed=done, width=36),
            Text(f"{format_seconds(left)} left" if math.isfinite(left) else "starting", style="dim"),
        )
        if self._last is None:
            return Group(bar)
        figures = Table.grid(padding=(0, 3), expand=False)
        last = self._last
        name, value, note = last.curve
        figures.add_row(
            Text.assemble(
                (f"{name} ", "dim"),
                (f"{value:.3f} ", "bold"),
                (sparkline(self._values, 16), "green"),
                (note, "dim"),
            ),
            *(Text.assemble((f"{label} ", "dim"), figure.strip()) for label, figure in last.figures.items()),
            Text.assemble(f"{last.seconds:.2f}", (" s/step", "dim")),
        )
        return Group(bar, figures)


def _validated(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        measured = "" if before is None else f"{before:.3f} before; "
        return f"{measured}off (validation.num_prompts = 0)"
    return f"{before:.3f} before, {after:.3f} after ({after - before:+.3f})"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks of eight heights, averaged into at most `width` of them. What is not finite is a space.

    Example: `sparkline([0, 1, 2, 3], 4)` is `"▁▃▆█"`.
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        buckets = [values[low:high] for low, high in pairwise(edges)]
    else:
        buckets = [[value] for value in values]
    means = [fmean(bucket) for bucket in buckets]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        _BLOCKS[math.floor((mean - low) / span * (len(_BLOCKS) - 1) + 0.5)] if math.isfinite(mean) else " "
        for mean in means
    )


def format_seconds(seconds: float) -> str:
    """`75.2` is `"1 min 15 s"`, `8.25` is `"8.2 s"`, `7260` is `"2 h 1 min"`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
