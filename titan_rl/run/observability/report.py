"""`report.html`: a run's curves, figures, transcripts and settings on one page that needs no network."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from titan_rl.calls.plain import printable
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.observability.page import render_page
from titan_rl.run.observability.progress import format_seconds
from titan_rl.run.observability.warning_signs import warnings_of

Record = dict[str, Any]
Point = tuple[float, float | None]  # step, value; None leaves a gap


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with its name and a note to it."""

    name: str
    value: str
    note: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: a line, a faint one in the background, or large marks joined by a dashed line."""

    label: str
    points: Sequence[Point]  # [num_points], in order of the step
    style: Literal["line", "faint", "dots"] = "line"
    colour: Literal[1, 2] = 1  # of those that the page has for curves


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the steps of a run."""

    title: str
    y_label: str
    series: Sequence[Series]


@dataclass(frozen=True, slots=True)
class Report:
    """What the page says of a run."""

    name: str
    tiles: Sequence[Tile]
    warnings: Sequence[str]
    reward: Chart
    panels: Sequence[Chart]
    pairs_are_of: str
    pairs: Sequence[Sequence[Record]]  # rollouts, of the first and of the last step
    config: str  # the settings as TOML


@dataclass(frozen=True, slots=True)
class Panel:
    """One small chart: its title, its unit, and the metrics it shows with their labels."""

    title: str
    unit: str
    metrics: dict[str, str]


PANELS = (
    Panel("Throughput", "completion tokens/s", {"throughput/tokens_per_s": "tokens/s"}),
    Panel(
        "Time of a step", "seconds", {"time/step_s": "whole step", "time/wait_for_rollouts_s": "waiting for rollouts"}
    ),
    Panel("Staleness", "optimizer steps", {"train/staleness_mean": "mean", "train/staleness_max": "max"}),
    Panel("Completion length", "tokens", {"rollout/completion_tokens_mean": "mean"}),
    Panel(
        "Reward and filters",
        "mean reward",
        {"rollout/finished_reward_mean": "all that finished", "rollout/reward_mean": "trained on"},
    ),
    Panel("Groups that teach nothing", "share", {"rollout/zero_variance_groups": "all rewards equal"}),
    Panel("Loss", "loss", {"train/loss": "loss", "validation/loss": "held out"}),
    Panel("Gradient norm", "L2 norm", {"train/grad_norm": "norm before clipping"}),
    Panel("Clipped tokens", "share", {"train/clip_fraction": "share"}),
    Panel("Entropy", "nats", {"train/entropy": "entropy"}),
    Panel("Learning rate", "learning rate", {"train/lr": "learning rate"}),
    Panel(
        "Logprobs, trainer - generator",
        "largest |difference|",
        {"train/on_policy_logprob_diff_max": "on-policy tokens"},
    ),
    Panel("Probes after a pull", "mean |difference|", {"sync/probe_diff": "worst probe"}),
    Panel("Weight sync", "seconds", {"sync/pull_s": "pull", "sync/publish_s": "publish"}),
)

_SMOOTHING = 0.8  # of the exponential moving average that is drawn over the raw reward
_PAIRS = 3


def write_report(run_dir: RunDirectory | str | Path) -> Path:
    """Write `report.html` from the files of the run directory, whatever there is of them, and return its path."""
    run_dir = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    records, rollouts = read_jsonl(run_dir.metrics), read_jsonl(run_dir.rollouts)
    config = run_dir.config.read_text(encoding="utf-8") if run_dir.config.exists() else ""
    fresh = run_dir.report.with_suffix(".part")
    report = make_report(run_dir.path.resolve().name, records, rollouts, config)
    fresh.write_text(printable(render_page("report.html", report=report)), encoding="utf-8")
    os.replace(fresh, run_dir.report)
    return run_dir.report


def make_report(name: str, records: Sequence[Record], rollouts: Sequence[Record], config: str) -> Report:
    """What there is to say of a run.

    Args:
        records: lines of `metrics.jsonl`.
        rollouts: lines of `rollouts.jsonl`.
        config: the settings as TOML.
    """
    panels = [_panel(panel, records) for panel in (*PANELS, *_panels_of_tasks(records))]
    pairs_are_of, pairs = _transcripts(rollouts)
    return Report(
        name=name,
        tiles=list(_tiles(records, config)),
        warnings=warnings_of(records),
        reward=_reward(records),
        panels=[panel for panel in panels if panel.series],
        pairs_are_of=pairs_are_of,
        pairs=pairs,
        config=config,
    )


def curve(records: Iterable[Record], metric: str) -> list[Point]:
    """(step, value) of the records that have the metric.

    Example: `curve([{"step": 1, "train/loss": 0.5}, {"step": 2}], "train/loss")` is `[(1.0, 0.5)]`.
    """
    points = [(_number(record.get("step")), _number(record[metric])) for record in records if metric in record]
    return [(x, y if math.isfinite(y) else None) for x, y in points if math.isfinite(x)]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _is_validated(config: str) -> bool:
    try:
        return tomllib.loads(config).get("validation", {}).get("num_prompts") != 0
    except tomllib.TOMLDecodeError:
        return True


def _tiles(records: Sequence[Record], config: str) -> Iterator[Tile]:
    validation = _values(records, "validation/reward_mean")
    steps = [record for record in records if "time/step_s" in record]
    speeds = _values(steps, "throughput/tokens_per_s")
    tokens = [_number(r.get("throughput/tokens_per_s")) * _number(r.get("time/step_s")) for r in steps]
    if len(validation) > 1:
        before, after = validation[0], validation[-1]
        yield Tile("validation reward, held out", f"{before:.3f} → {after:.3f}", f"{after - before:+.3f}", wide=True)
    elif validation:
        yield Tile("validation reward, held out", f"{validation[0]:.3f}", "measured once", wide=True)
    elif not _is_validated(config):
        yield Tile("validation reward, held out", "off", "validation.num_prompts = 0", wide=True)
    yield Tile("steps", f"{len(steps):,}")
    if records:
        yield Tile("time", format_seconds(_number(records[-1].get("time_s", 0))))
    if speeds:
        trained = sum(count for count in tokens if math.isfinite(count))
        yield Tile("tokens trained on", f"{trained:,.0f}", f"{fmean(speeds):,.0f} tokens/s")


def _values(records: Iterable[Record], metric: str) -> list[float]:
    return [y for _, y in curve(records, metric) if y is not None]


def _panels_of_tasks(records: Sequence[Record]) -> Iterator[Panel]:
    """Where a run has several, or validates on several suites."""
    names = {name for record in records for name in record}
    for title, unit, pattern in [
        ("Reward by task", "mean reward", r"task/([^/]+)/finished_reward_mean"),
        ("Share of the groups trained on", "share", r"task/([^/]+)/share"),
        ("Held-out reward by suite", "mean reward", r"validation/([^/]+)/reward_mean"),
    ]:
        found = {name: match[1] for name in sorted(names) if (match := re.fullmatch(pattern, name))}
        if found:
            yield Panel(title, unit, found)


def _reward(records: Sequence[Record]) -> Chart:
    train = [point for record in records for point in curve([record], _reward_metric(record))]
    series = (
        Series("train, smoothed", _smooth(train)),
        Series("validation", curve(records, "validation/reward_mean"), "dots", colour=2),
        Series("train", train, "faint"),
    )
    return _chart("Reward", "mean reward", series)


def _reward_metric(record: Record) -> str:
    """What the policy earned in a step: of all that finished, where there was any, else of what was trained on."""
    finished = "rollout/finished_reward_mean"
    return finished if finished in record else "rollout/reward_mean"


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Exponential moving average whose first values are the mean of what there is, as Adam corrects its bias."""
    smoothed: list[Point] = []
    total = weight = 0.0
    for x, y in points:
        if y is not None:
            total = _SMOOTHING * total + (1 - _SMOOTHING) * y
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
            smoothed.append((x, total / weight))
    return smoothed


def _panel(panel: Panel, records: Sequence[Record]) -> Chart:
    series = [
        Series(label, curve(records, name), colour=colour)
        for colour, (name, label) in zip((1, 2), panel.metrics.items(), strict=False)
    ]
    return _chart(panel.title, panel.unit, series)


def _chart(title: str, y_label: str, series: Iterable[Series]) -> Chart:
    """Of the curves that have a value."""
    return Chart(title, y_label, [one for one in series if any(y is not None for _, y in one.points)])


def _transcripts(rollouts: Sequence[Record]) -> tuple[str, Sequence[Sequence[Record]]]:
    """Rollouts of the first and the last step side by side, and words for which they are. They are of the same prompts
    where there are such, and of dropped groups only where there are no others."""
    rollouts = [rollout for rollout in rollouts if not rollout.get("dropped")] or rollouts
    for phase in ("validation", "train"):
        of_phase = [rollout for rollout in rollouts if rollout.get("phase") == phase]
        steps = sorted({int(_number(rollout.get("step", 0))) for rollout in of_phase})
        if len(steps) > 1 or (steps and phase == "train"):
            break
    else:
        return "", []
    first, last = ([r for r in of_phase if r.get("step") == step] for step in (steps[0], steps[-1]))
    if len(steps) == 1:
        return f"{phase.capitalize()} rollouts of step {steps[0]}.", [[rollout] for rollout in first[:_PAIRS]]
    which = f"{phase.capitalize()} rollouts of step {steps[0]}, and of step {steps[-1]}."
    return which, _pair(first, last)[:_PAIRS]


def _pair(first: Sequence[Record], last: Sequence[Record]) -> list[tuple[Record, Record]]:
    """One rollout of each prompt, with one of the same prompt later; else with whichever comes next."""

    def by_prompt(rollouts: Sequence[Record]) -> dict[str, Record]:
        prompts: dict[str, Record] = {}
        for rollout in rollouts:
            prompts.setdefault(_prompt(rollout), rollout)
        return prompts

    before, after = by_prompt(first), by_prompt(last)
    same = [(rollout, after[prompt]) for prompt, rollout in before.items() if prompt in after]
    return same or list(zip(before.values(), after.values(), strict=False))


def _prompt(rollout: Record) -> str:
    users = [message for message in rollout.get("messages") or [] if message.get("role") == "user"]
    return str(users[0].get("content")) if users else str(rollout.get("rollout_id"))
