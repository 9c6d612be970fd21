"""`report.html`: a run's curves, figures, transcripts and settings on one page that needs no network."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.calls.plain import printable
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.observability.chart import Point, Series, format_number, line_chart
from titan_rl.run.observability.page import details, figure, page, tile
from titan_rl.run.observability.progress import format_seconds

Record = dict[str, Any]


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
    Panel("Loss", "loss", {"train/loss": "loss"}),
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
    text = render_report(run_dir.path.resolve().name, records, rollouts, config)
    fresh.write_text(printable(text), encoding="utf-8")
    os.replace(fresh, run_dir.report)
    return run_dir.report


def render_report(name: str, records: Sequence[Record], rollouts: Sequence[Record], config: str) -> str:
    """The page as text.

    Args:
        name: of the run.
        records: lines of `metrics.jsonl`.
        rollouts: lines of `rollouts.jsonl`.
        config: the settings as TOML.
    """
    sections = [f"<h1>{escape(name)}</h1>", _tiles(records, config), _reward_figure(records)]
    panels = [rendered for panel in PANELS if (rendered := _panel(panel, records))]
    if panels:
        sections += ["<h2>Step by step</h2>", f'<div class="charts">{"".join(panels)}</div>']
    sections += _transcripts(rollouts)
    if config:
        sections += ["<h2>Settings</h2>", details("config.toml", config)]
    return page(name, "\n".join(sections))


def curve(records: Iterable[Record], metric: str) -> list[Point]:
    """(step, value) of the records that have the metric; what is null there is NaN here.

    Example: `curve([{"step": 1, "train/loss": 0.5}, {"step": 2}], "train/loss")` is `[(1.0, 0.5)]`.
    """
    return [(_number(record.get("step")), _number(record[metric])) for record in records if metric in record]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _is_validated(config: str) -> bool:
    try:
        return tomllib.loads(config).get("validation", {}).get("num_prompts") != 0
    except tomllib.TOMLDecodeError:
        return True


def _tiles(records: Sequence[Record], config: str) -> str:
    validation = [y for _, y in curve(records, "validation/reward_mean") if math.isfinite(y)]
    steps = [record for record in records if "time/step_s" in record]
    speeds = [y for _, y in curve(steps, "throughput/tokens_per_s") if math.isfinite(y)]
    tokens = [_number(r.get("throughput/tokens_per_s")) * _number(r.get("time/step_s")) for r in steps]
    tiles: list[str] = []
    if len(validation) > 1:
        before, after = validation[0], validation[-1]
        tiles.append(
            tile("validation reward, held out", f"{before:.3f} → {after:.3f}", f"{after - before:+.3f}", "wide")
        )
    elif validation:
        tiles.append(tile("validation reward, held out", f"{validation[0]:.3f}", "measured once", "wide"))
    elif not _is_validated(config):
        tiles.append(tile("validation reward, held out", "off", "validation.num_prompts = 0", "wide"))
    tiles.append(tile("steps", f"{len(steps):,}"))
    if records:
        tiles.append(tile("time", format_seconds(_number(records[-1].get("time_s", 0)))))
    if speeds:
        trained = sum(count for count in tokens if math.isfinite(count))
        tiles.append(tile("tokens trained on", format_number(round(trained)), f"{fmean(speeds):,.0f} tokens/s"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _reward_figure(records: Sequence[Record]) -> str:
    train = [point for record in records for point in curve([record], _reward_metric(record))]
    validation = curve(records, "validation/reward_mean")
    series = [
        Series("train, smoothed", _smooth(train)),
        Series("validation", validation, "dots"),
        Series("train", train, "faint"),
    ]
    chart = line_chart(series, y_label="mean reward", width=1060, height=340)
    chart = chart.replace('"s3 faint', '"s1 faint')  # the same thing, unsmoothed
    return figure("Reward", chart, {"train": "--s1", "validation": "--s2"})


def _reward_metric(record: Record) -> str:
    """What the policy earned in a step: of all that finished, where there was any, else of what was trained on."""
    finished = "rollout/finished_reward_mean"
    return finished if finished in record else "rollout/reward_mean"


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Exponential moving average whose first values are the mean of what there is, as Adam corrects its bias."""
    smoothed: list[Point] = []
    total = weight = 0.0
    for x, y in points:
        if math.isfinite(y):
            total = _SMOOTHING * total + (1 - _SMOOTHING) * y
            weight = _SMOOTHING * weight + (1 - _SMOOTHING)
            smoothed.append((x, total / weight))
    return smoothed


def _panel(panel: Panel, records: Sequence[Record]) -> str:
    series = [Series(label, points) for name, label in panel.metrics.items() if (points := curve(records, name))]
    if not series:
        return ""
    legend = {one.label: f"--s{number}" for number, one in enumerate(series, 1)} if len(series) > 1 else None
    return figure(panel.title, line_chart(series, y_label=panel.unit), legend)


def _transcripts(rollouts: Sequence[Record]) -> list[str]:
    """Rollouts of the first and the last step side by side; of the same prompts where there are such. Those of dropped
    groups only where there are no others."""
    rollouts = [rollout for rollout in rollouts if not rollout.get("dropped")] or rollouts
    for phase in ("validation", "train"):
        of_phase = [rollout for rollout in rollouts if rollout.get("phase") == phase]
        steps = sorted({int(_number(rollout.get("step", 0))) for rollout in of_phase})
        if len(steps) > 1 or (steps and phase == "train"):
            break
    else:
        return []
    first, last = ([r for r in of_phase if r.get("step") == step] for step in (steps[0], steps[-1]))
    pairs = _pair(first, last)[:_PAIRS] if len(steps) > 1 else [(one, None) for one in first[:_PAIRS]]
    cards = [
        f'<div class="pair">{"".join(_rollout(rollout) for rollout in pair if rollout is not None)}</div>'
        for pair in pairs
    ]
    hint = f"{phase.capitalize()} rollouts of step {steps[0]}" + (
        f", and of step {steps[-1]}" if len(steps) > 1 else ""
    )
    return ["<h2>Transcripts</h2>", f'<p class="hint">{hint}.</p>', "<br>", *cards]


def _pair(first: Sequence[Record], last: Sequence[Record]) -> list[tuple[Record, Record | None]]:
    """One rollout of each prompt, with one of the same prompt later; else with whichever comes next."""

    def by_prompt(rollouts: Sequence[Record]) -> dict[str, Record]:
        prompts: dict[str, Record] = {}
        for rollout in rollouts:
            prompts.setdefault(_prompt(rollout), rollout)
        return prompts

    before, after = by_prompt(first), by_prompt(last)
    same = [(rollout, after[prompt]) for prompt, rollout in before.items() if prompt in after]
    return [*same] or list(zip(before.values(), after.values(), strict=False))


def _prompt(rollout: Record) -> str:
    users = [message for message in rollout.get("messages") or [] if message.get("role") == "user"]
    return str(users[0].get("content")) if users else str(rollout.get("rollout_id"))


def _rollout(rollout: Record) -> str:
    reward, status = rollout.get("reward"), str(rollout.get("status", ""))
    meta = [
        f"<b>step {escape(str(rollout.get('step', '?')))}</b>",
        f"reward <b>{reward:.3f}</b>" if isinstance(reward, int | float) else "not scored",
        f'<span class="{"good" if status == "completed" else "bad"}">{escape(status.replace("_", " "))}</span>',
        f"{escape(str(rollout.get('num_completion_tokens', 0)))} tokens",
    ]
    messages = "".join(
        f'<div class="message {"assistant" if message.get("role") == "assistant" else ""}">'
        f'<div class="role">{escape(str(message.get("role", "")))}</div>'
        f"<pre>{escape(str(message.get('content') or ''))}</pre></div>"
        for message in rollout.get("messages") or []
    )
    error = f'<p class="bad">{escape(str(rollout["error"]))}</p>' if rollout.get("error") else ""
    joined = "".join(f"<span>{item}</span>" for item in meta)
    return f'<div class="card"><div class="meta">{joined}</div>{messages}{error}</div>'
