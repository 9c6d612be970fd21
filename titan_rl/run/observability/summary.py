"""Closing summary of a finished run."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from rich.text import Text

from titan_rl.core.errors import CheckpointError
from titan_rl.core.run_files import ADAPTERS
from titan_rl.metrics.bottleneck import bottleneck
from titan_rl.run.directory import each_of
from titan_rl.run.held_out import best_of
from titan_rl.run.terminal.live_display import ForgivingConsole, format_seconds
from titan_rl.training.state.checkpoint import step_of
from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.summary import judge, read_config
from titan_rl.viewer.verdicts import Verdict


class ShownSummary(Protocol):
    """Summary of a finished run, as labelled rows."""

    @property
    def rows(self) -> Mapping[str, str]:
        """Values by their labels."""
        ...

    @property
    def achieved(self) -> str | None:
        """Label of the row that shows an improvement; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of a finished run. Both rewards are means over the same held-out samples; None if validation is off.

    Attributes:
        adapters: Summaries of the adapters by name, in a run with several adapters. The rewards of the run itself are
            then None.
    """

    reward_before: float | None
    reward_after: float | None
    steps: int
    tokens: int  # completion tokens trained on
    seconds: float
    run_dir: Path
    adapters: Mapping[str, RunSummary] = field(default_factory=dict[str, "RunSummary"])

    @classmethod
    def of_adapters(cls, adapters: Mapping[str, RunSummary], run_dir: Path, seconds: float) -> RunSummary:
        """Build the summary of a run with several adapters."""
        each = adapters.values()
        steps, tokens = sum(summary.steps for summary in each), sum(summary.tokens for summary in each)
        return cls(None, None, steps, tokens, seconds, run_dir, adapters)

    @property
    def rows(self) -> Mapping[str, str]:
        validated = {
            "validation reward": _validated(self.reward_before, self.reward_after),
            **verdict_row(self.verdict),
        }
        if self.adapters:
            validated = {f"adapter {name}": each.result for name, each in self.adapters.items()}
        return {
            **validated,
            "steps": f"{self.steps:,}",
            "tokens": f"{self.tokens:,}",
            "time": format_seconds(self.seconds),
            **self._faults,
            **self._held_up_by,
            **self._best,
            **({"policy": f"{export}"} if (export := self.run_dir / "export").is_dir() else {}),
            **({"policies": f"{self.run_dir / ADAPTERS / 'NAME' / 'export'}"} if self.adapters else {}),
            "report": f"{self.run_dir / 'report.html'}",
        }

    @property
    def result(self) -> str:
        """Steps, validation reward and verdict in one line: "80 steps; validation reward 0.200 before, 0.500 after
        (+0.300); it learns"."""
        steps, verdict = "1 step" if self.steps == 1 else f"{self.steps:,} steps", self.verdict
        said = "" if verdict is None else f"; {verdict['title'][0].lower()}{verdict['title'][1:]}"
        return f"{steps}; validation reward {_validated(self.reward_before, self.reward_after)}{said}"

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on whether the run learns, as on its page; None without metrics."""
        return verdict_of(self.run_dir)

    @property
    def achieved(self) -> str | None:
        verdict = None if self.adapters else self.verdict
        return "verdict" if verdict is not None and verdict["tone"] == "good" else None

    @property
    def _faults(self) -> Mapping[str, str]:
        names = ("rollout/finished_rollouts", "rollout/finished_fault_fraction")
        records = [*each_of(self.run_dir / "metrics.jsonl")]
        found = [tuple(record[name] for name in names) for record in records if names[1] in record]
        num_faults = round(sum(count * share for count, share in found))
        rollouts = f"{round(sum(count for count, _ in found)):,} rollouts"
        return {"faults": f"{num_faults:,} of {rollouts}, which no reward above includes"} if num_faults else {}

    @property
    def _best(self) -> Mapping[str, str]:
        """Row of the best policy, if it is not the last one."""
        with contextlib.suppress(CheckpointError):
            if (best := best_of(self.run_dir / "checkpoints")) is None:
                return {}
            checkpoint, reward = best
            if checkpoint is None:
                return {"best": f"the initial model, with validation reward {reward:.3f}; no step is better"}
            if step_of(checkpoint) < self.steps:
                command = shlex.join(["titan-rl", "export", str(self.run_dir), "OUT", "--best"])
                return {
                    "best": f"step {step_of(checkpoint)}, with validation reward {reward:.3f}; export it: {command}"
                }
        return {}

    @property
    def _held_up_by(self) -> Mapping[str, str]:
        found = bottleneck(each_of(self.run_dir / "metrics.jsonl"))
        return {} if found is None else {"held up by": f"{found.name}, {found.share:.0%} of a step's time"}

    @property
    def rewards(self) -> list[float]:
        """Mean reward of the rollouts of each step, including steps before the run was resumed."""
        rewards: dict[int, float] = {}
        for record in each_of(self.run_dir / "metrics.jsonl"):
            reward = record.get("rollout/finished_reward_mean", record.get("rollout/reward_mean"))
            if isinstance(reward, int | float):
                rewards[record["step"]] = reward
        return [reward for _, reward in sorted(rewards.items())]


def show_summary(summary: ShownSummary, file: TextIO | None = None) -> None:
    """Print the closing table.

    Args:
        file: File to write to. Defaults to standard output.
    """
    console = ForgivingConsole(file or sys.stdout)
    rows, achieved = summary.rows, summary.achieved
    label_width = max(map(len, rows))
    console.print()
    for label, value in rows.items():
        style = "bold green" if label == achieved else ""
        console.print(Text.assemble((f"{label:<{label_width}}  ", "dim"), (value, style)))


def verdict_of(run: Path) -> Verdict | None:
    """Verdict on whether a run learns, as on its page; None without metrics."""
    columns = MetricColumns()
    for record in each_of(run / "metrics.jsonl"):
        columns.add(record)
    return next(iter(judge(columns, read_config(run))), None)


def verdict_row(verdict: Verdict | None) -> dict[str, str]:
    return {} if verdict is None else {"verdict": f"{verdict['title']}. {verdict['text']}"}


def _validated(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        measured = "" if before is None else f"{before:.3f} before; "
        return f"{measured}off (validation.num_prompts = 0)"
    return f"{before:.3f} before, {after:.3f} after ({after - before:+.3f})"
