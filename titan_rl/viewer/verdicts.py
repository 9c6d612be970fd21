"""Verdicts on a run: whether it learns, and if not, why. Each has a link to the rollouts or curves that show it.

    learning    change of held-out and training reward from the first to the last steps, compared with their noise
    reasons     signs in the last steps: equal rewards, cut-off or unreadable answers, collapse, stale or wrong weights
    warnings    signs that a run prints, because nothing fails while a run learns nothing

A verdict is {"tone": "good", "warn", "bad" or "", "title", "text", "link": {"label", "tab", "values"} or None}, where
`values` go into the hash of the page: {"rollouts.status": "error_parse", "rollouts.step_min": 11}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, variance
from typing import Any, Literal

from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE
from titan_rl.viewer.metric_columns import MetricColumns

RECENT = 10
"""Number of steps over which current figures are averaged."""

EARNED = ("rollout/finished_reward_mean", "rollout/reward_mean")
HELD_OUT = "validation/reward_mean"
LOSSES = ("validation/loss", "train/loss")

_SURE = 2.0  # number of standard errors that a change has to exceed
_FEWEST = 3  # steps on each side of a comparison
_NOTHING = 1e-6  # rewards up to this count as zero

Tone = Literal["good", "warn", "bad", ""]
Verdict = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """Change of a metric between two steps.

    Args:
        error: Standard error of the difference; None if unknown.
    """

    metric: str
    before: float
    after: float
    first_step: float
    last_step: float
    error: float | None

    @property
    def direction(self) -> int:
        """Direction of the change: 1 up, -1 down, 0 within the noise. Without a known error any change counts."""
        gain = self.after - self.before
        return 0 if abs(gain) <= _SURE * (self.error or 0.0) else 1 if gain > 0 else -1

    @property
    def figures(self) -> str:
        return f"{_figure(self.before)} → {_figure(self.after)}"


def held_out_change(columns: MetricColumns, metric: str) -> Change | None:
    """Change from the first validation to the last; None if there were not two.

    The error is that of two independent means over prompts. It is larger than the error for the same prompts measured
    twice.
    """
    points = [(step, value) for step, value in columns.points(metric) if math.isfinite(value)]
    if len(points) < 2:
        return None
    (first, before), (last, after) = points[0], points[-1]
    return Change(metric, before, after, first, last, _held_out_error(columns, metric))


def _held_out_error(columns: MetricColumns, metric: str) -> float | None:
    """Standard error of the difference of two validations. For the mean of several suites, it is combined from
    theirs."""
    prefix, _, name = metric.rpartition("/")
    if name != "reward_mean":
        return None
    spreads, counts = columns.values(f"{prefix}/reward_std"), columns.values(f"{prefix}/num_groups")
    if spreads and counts and counts[-1] > 0:
        return math.hypot(spreads[0], spreads[-1]) / math.sqrt(counts[-1])
    suites = _named(columns, r"validation/([^/]+)/reward_mean") if metric == HELD_OUT else []
    errors = [_held_out_error(columns, f"validation/{suite}/reward_mean") for suite in suites]
    known = [error for error in errors if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(errors) else None


def earned_change(columns: MetricColumns, metric: str) -> Change | None:
    """Change from the mean of the first steps to the mean of the last, at most `RECENT` each. None with fewer than
    twice `_FEWEST` steps."""
    points = [(step, value) for step, value in columns.points(metric) if math.isfinite(value)]
    count = min(RECENT, len(points) // 2)
    if count < _FEWEST:
        return None
    before, after = ([value for _, value in part] for part in (points[:count], points[-count:]))
    error = math.sqrt((variance(before) + variance(after)) / count)
    return Change(metric, fmean(before), fmean(after), points[0][0], points[-1][0], error)


def task_lines(columns: MetricColumns, names: Sequence[str]) -> list[dict[str, Any]]:
    """Make a line for each task or suite of a run that has several.

    Args:
        names: Names of the run's tasks, in their order.

    Returns:
        List of {"name", "earned": change or None, "held_out": change or None, "now": mean reward of the last steps,
        "share" of the groups, "tone", "title"}. Empty for a run with one task.
    """
    tasks = _named(columns, r"task/([^/]+)/finished_reward_mean")
    suites = _named(columns, r"validation/([^/]+)/reward_mean")
    every = list(dict.fromkeys([*names, *tasks, *suites]))
    if len(every) < 2:
        return []
    lines: list[dict[str, Any]] = []
    for name in every:
        metric = f"task/{name}/finished_reward_mean"
        earned, held_out = earned_change(columns, metric), held_out_change(columns, f"validation/{name}/reward_mean")
        recent = columns.values(metric)[-RECENT:]
        tone, title = _of_task(earned, held_out, recent, columns.count(metric))
        shares = columns.values(f"task/{name}/share")[-RECENT:]
        lines.append(
            {
                "name": name,
                "earned": None if earned is None else asdict(earned),
                "held_out": None if held_out is None else asdict(held_out),
                "now": fmean(recent) if recent else None,
                "share": fmean(shares) if shares else None,
                "tone": tone,
                "title": title,
            }
        )
    return lines


def verdicts(columns: MetricColumns, tasks: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Make the verdicts on a run. The first says whether it learns, the others why it may not, the worst first. Empty
    without metrics.

    Args:
        tasks: Result of `task_lines`.
    """
    learning = _learning(columns)
    if learning is None:
        return []
    hidden = "The mean of all tasks hides it." if learning["tone"] == "good" else ""
    reasons = sorted([*_of_tasks(columns, tasks, hidden), *_reasons(columns)], key=lambda one: one["tone"] != "bad")
    if learning["tone"] == "bad" and not reasons:
        learning["text"] += " No metric shows a reason: read its rollouts, the median first."
    return [learning, *reasons]


def _learning(columns: MetricColumns) -> Verdict | None:
    earned = next((found for name in EARNED if (found := earned_change(columns, name))), None)
    held_out = held_out_change(columns, HELD_OUT)
    if not any(columns.count(name) for name in (*EARNED, HELD_OUT)) and not _named(
        columns, r"validation/([^/]+)/reward_mean"
    ):
        return _of_loss(columns)
    link = _curves("reward_mean", "reward by step")
    changes = [change for change in (held_out, earned) if change is not None]
    if not changes:
        steps = max((columns.count(name) for name in EARNED), default=0)
        text = f"{steps} step{'' if steps == 1 else 's'} so far; {2 * _FEWEST} steps, or two validations, say more."
        return _verdict("", "Too early to tell whether it learns", text, link)
    changes_text = "; ".join(_change_text(change) for change in changes)
    directions = [change.direction for change in changes]
    if held_out is not None and earned is not None and held_out.direction < 0 < earned.direction:
        text = f"{changes_text}. More samples, or fewer steps on the same ones."
        return _verdict("bad", "It memorizes its samples: training reward rises, held-out reward falls", text, link)
    if max(directions) > 0 and min(directions) >= 0:
        return _verdict("good", "It learns", f"{changes_text}.", link)
    if min(directions) < 0:
        return _verdict("bad", "It gets worse", f"{changes_text}. Try a lower training.lr.", link)
    if max(columns.count(name) for name in EARNED) < 2 * RECENT:
        return _verdict("", "Too early to tell whether it learns", f"{changes_text}: no more than noise so far.", link)
    return _verdict(
        "bad", "It does not learn", f"{changes_text}: no more than noise.", _rollouts(columns, "its latest rollouts")
    )


def _of_loss(columns: MetricColumns) -> Verdict | None:
    """Verdict on supervised training."""
    held_out, trained = held_out_change(columns, LOSSES[0]), earned_change(columns, LOSSES[1])
    change = held_out or trained
    if change is None:
        return _verdict("", "Too early to tell whether it learns", "", None) if columns.count(LOSSES[1]) else None
    link = _curves("loss", "loss by step")
    if change.direction < 0:
        return _verdict("good", "It learns", f"{_change_text(change)}.", link)
    title = "It gets worse" if change.direction > 0 else "It does not learn"
    return _verdict("bad", title, f"{_change_text(change)}. Try another sft.lr.", link)


def _change_text(change: Change) -> str:
    names = {HELD_OUT: "Held-out reward", LOSSES[0]: "Held-out loss", LOSSES[1]: "Loss"}
    name = names.get(change.metric, "Reward in training")
    error = "" if change.error is None else f" ± {change.error:.3f}"
    steps = f"steps {change.first_step:.0f} to {change.last_step:.0f}"
    return f"{name} {change.figures} ({change.after - change.before:+.3f}{error}, {steps})"


def _of_task(
    earned: Change | None, held_out: Change | None, recent: Sequence[float], num_steps: int
) -> tuple[Tone, str]:
    if len(recent) >= _FEWEST and max(map(abs, recent)) <= _NOTHING:
        return "bad", "earns nothing"
    directions = [change.direction for change in (held_out, earned) if change is not None]
    if not directions:
        return "", "too early to tell"
    if min(directions) < 0:
        return "bad", "gets worse"
    if max(directions) > 0:
        return "good", "learns"
    return ("bad", "does not learn") if num_steps >= 2 * RECENT else ("", "too early to tell")


def _of_tasks(columns: MetricColumns, tasks: Sequence[Mapping[str, Any]], hidden: str) -> Iterator[Verdict]:
    """Verdicts on tasks that do not learn."""
    for task in tasks:
        if task["tone"] == "bad":
            name = task["name"]
            texts = [hidden] if hidden else []
            if task["now"] is not None:
                texts.append(f"Its reward in the last steps is {task['now']:.3f}.")
            if task["title"] == "earns nothing":
                texts.append(f"Try: {EQUAL_REWARDS_ADVICE}.")
            link = _rollouts(columns, "its latest rollouts", task=name)
            yield _verdict("bad", f"The task {name} {task['title']}", " ".join(texts), link)


@dataclass(frozen=True, slots=True)
class _Reason:
    """Sign in the last steps that explains why a run may not learn.

    Args:
        metric: Its mean over the last steps is compared.
        warn, bad: Values from which on it is a warning, or bad.
        title: Title with a placeholder for the value.
        status: Status of the rollouts that show it; "" links to the curve, "*" to all rollouts of these steps.
    """

    metric: str
    warn: float
    bad: float
    title: str
    text: str
    status: str = ""


_REASONS = (
    _Reason("rollout/zero_variance_groups", 0.9, 0.99,
          "{:.0%} of the groups teach nothing: all their rollouts earn the same",
          f"Try: {EQUAL_REWARDS_ADVICE}.", "*"),
    _Reason("rollout/status/error_parse", 0.1, 0.5, "{:.0%} of the answers cannot be parsed",
          "Try the model.renderer that is made for this model, or titan-rl sft on demonstrations.", "error_parse"),
    _Reason("rollout/status/truncated_length", 0.1, 0.5, "{:.0%} of the rollouts are cut off at sampling.max_tokens",
          "Try a larger one, or a prompt that asks for less.", "truncated_length"),
    _Reason("rollout/status/truncated_prompt", 0.1, 0.5, "{:.0%} of the rollouts fill model.max_context",
          "Try a larger one, fewer turns (rollout.max_turns), or shorter prompts.", "truncated_prompt"),
    _Reason("rollout/status/truncated_turns", 0.5, 1.1, "{:.0%} of the rollouts use up their turns",
          "Try a larger rollout.max_turns.", "truncated_turns"),
    _Reason("rollout/status/truncated_time", 0.1, 0.5, "{:.0%} of the rollouts run out of time",
          "Try a larger rollout.rollout_timeout_s, or a faster environment.", "truncated_time"),
    _Reason("rollout/status/error_env", 0.05, 0.3, "{:.0%} of the rollouts fail in the environment",
          "They take no part in training. logs/controller.log has each error in full.", "error_env"),
    _Reason("rollout/status/error_timeout", 0.05, 0.3, "{:.0%} of the rollouts end because a call takes too long",
          "They take no part in training.", "error_timeout"),
    _Reason("rollout/status/error_generate", 0.05, 0.3, "{:.0%} of the rollouts fail while generating",
          "They take no part in training.", "error_generate"),
    _Reason("train/on_policy_logprob_diff_mean", 1e-2, 1e-1, "Trainer and generators disagree on logprobs by {:.2g}",
          "Their computations differ, and other signs may be a consequence of that."),
    _Reason("train/approx_kl", 0.05, 0.5, "The trained policy is far from the one that sampled: a KL of {:.2g}",
          "Try a lower training.lr, or a smaller scheduling.max_staleness."),
    _Reason("train/clip_fraction", 0.2, 0.5, "{:.0%} of the tokens are clipped",
          "Steps are too large: try a lower training.lr."),
    _Reason("train/num_nonfinite_tokens", 1e-9, 1.0, "{:.2g} tokens a step have a loss that is not finite",
          "They are left out."),
)  # fmt: skip


def _reasons(columns: MetricColumns) -> Iterator[Verdict]:
    for sign in _REASONS:
        recent = columns.values(sign.metric)[-RECENT:]
        if not recent or (value := fmean(recent)) < sign.warn:
            continue
        status = {} if sign.status == "*" else {"status": sign.status}
        link = _rollouts(columns, "these rollouts", **status) if sign.status else _curves(sign.metric, "the curve")
        yield _verdict("bad" if value >= sign.bad else "warn", sign.title.format(value), sign.text, link)
    entropies, gradients = columns.values("train/entropy"), columns.values("train/grad_norm")
    if len(entropies) > RECENT and fmean(entropies[-RECENT:]) < 0.05 * entropies[0]:
        title = f"The entropy has collapsed: {entropies[0]:.3g} at first, {fmean(entropies[-RECENT:]):.2g} now"
        text = "Siblings write the same. Try a lower training.lr, or a larger high of training.clip."
        yield _verdict("warn", title, text, _curves("train/entropy", "the curve"))
    if skipped := num_skipped(columns.values("train/skipped_steps")):
        title = f"{skipped:.0f} step{'' if skipped == 1 else 's'} had no finite loss or gradient, and changed nothing"
        link = {"label": "their rollouts", "tab": "rollouts", "values": {"rollouts.dropped": "true"}}
        yield _verdict("warn", title, "training.max_skipped_steps says how many a run tolerates.", link)
    if len(gradients) >= _FEWEST and not any(gradients[-RECENT:]):
        yield _verdict(
            "bad", "The gradient is zero", "No step changes the weights.", _curves("train/grad_norm", "the curve")
        )


def _rollouts(columns: MetricColumns, label: str, **filters: str) -> dict[str, Any]:
    """Make a link to the rollouts of the last steps that match the filters."""
    steps = [step for name in EARNED for step, _ in columns.points(name)[-RECENT:]]
    values: dict[str, Any] = {f"rollouts.{name}": value for name, value in filters.items()}
    if steps:
        values["rollouts.step_min"] = min(steps)
    return {"label": label, "tab": "rollouts", "values": {**values, "rollouts.phase": "train"}}


def num_skipped(counts: Sequence[float]) -> float:
    """Number of skipped steps of the whole run. Each count starts at the run's start or latest resume."""
    return sum(max(0.0, now - before if now >= before else now) for before, now in pairwise([0.0, *counts]))


def _curves(words: str, label: str) -> dict[str, Any]:
    return {"label": label, "tab": "curves", "values": {"metrics": words}}


def _verdict(tone: Tone, title: str, text: str, link: Mapping[str, Any] | None) -> Verdict:
    return {"tone": tone, "title": title, "text": text, "link": link}


def _named(columns: MetricColumns, pattern: str) -> list[str]:
    return [match[1] for name in columns if (match := re.fullmatch(pattern, name))]


def _figure(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"


IN_A_ROW = 3
"""Number of consecutive steps with a sign before it is reported."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Warning sign in the metrics of a run.

    Args:
        metric: Name of a metric that is a share, in [0, 1].
        least: Value from which on it is a sign.
        text: Meaning of the sign and advice, for a person.
    """

    metric: str
    least: float
    text: str


SIGNS = (
    Sign(
        "rollout/zero_variance_groups",
        1.0,
        f"all rollouts of every group earned the same reward, so nothing is being learned. Try: {EQUAL_REWARDS_ADVICE}",
    ),
    Sign(
        "rollout/status/truncated_length",
        0.9,
        "nearly all rollouts are cut off at sampling.max_tokens. Try: a larger one; a prompt that asks for less, or "
        "titan-rl sft on demonstrations that are short and end",
    ),
    Sign(
        "rollout/status/truncated_prompt",
        0.9,
        "nearly all rollouts end because their prompts fill model.max_context. Try: a larger one, fewer turns "
        "(rollout.max_turns), or shorter prompts",
    ),
    Sign(
        "rollout/status/error_parse",
        0.9,
        "nearly no answer can be parsed (error_parse). Try: the model.renderer that is made for this model; titan-rl "
        "sft on demonstrations, for the form of calls of tools",
    ),
    Sign(
        "sync/unverified_share",
        0.001,
        "some of the generators' weights are not verified: they cannot be read back from the engine, and the probes "
        "cannot distinguish a version from the previous one. Try: held_weights() in an engine of your own; more "
        "statedict.num_probes",
    ),
)


class WarningSigns:
    """Detector of warning signs in the steps of a run. Each is reported once, after `IN_A_ROW` steps in a row."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(SIGNS, 0)  # number of consecutive steps with the sign

    def look(self, metrics: Mapping[str, Any]) -> list[str]:
        """Return the warnings to print after a step with these metrics.

        Args:
            metrics: One line of `metrics.jsonl`. Lines without a sign's metric do not count for that sign.
        """
        warnings: list[str] = []
        for sign in SIGNS:
            share = metrics.get(sign.metric)
            if not isinstance(share, int | float) or self._seen[sign] >= IN_A_ROW:
                continue
            self._seen[sign] = self._seen[sign] + 1 if share >= sign.least else 0
            if self._seen[sign] == IN_A_ROW:
                warnings.append(f"for {IN_A_ROW} steps {sign.text}")
        return warnings
