"""Verdicts on a run: whether it learns, and if not, why. Each has a link to the rollouts or curves that show it.

    learning    whether rewards rose, fell from their best, or stand where there is nothing left to learn; see `changes`
    reasons     signs in the last steps: equal rewards, cut-off or unreadable answers, collapse, stale or wrong weights

A verdict is {"tone": "good", "warn", "bad" or "", "title", "text", "link": {"label", "tab", "values"} or None}, where
`values` go into the hash of the page: {"rollouts.status": "error_parse", "rollouts.step_min": 11}.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from titan_rl.scheduling.filters import EQUAL_REWARDS_ADVICE
from titan_rl.viewer.changes import (
    FEWEST,
    HELD_OUT,
    LEAST,
    RECENT,
    Change,
    RewardRange,
    earned_change,
    fall,
    finite_points,
    held_out_change,
    suites_of,
)
from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.signs import SIGNS

EARNED = ("rollout/finished_reward_mean", "rollout/reward_mean")
LEAGUE = "league/win_rate"
LOSSES = ("validation/loss", "train/loss")

_NOTHING = 1e-6  # rewards up to this count as zero
_COLLAPSED = 0.2  # of the first entropy, if the reward falls as well
_VANISHED = 0.05  # of the first entropy, whatever the reward does
_GROWN = 2.0  # times the first entropy
_ROUNDING = 5.0  # factor of the differences of logprobs that count, in bfloat16

LOST_REWARD_ADVICE = 'a lower training.lr or a larger training.kl_coef; checkpoint.keep = "best" keeps the best weights'
"""Advice for runs whose reward falls."""

Tone = Literal["good", "warn", "bad", ""]
Verdict = dict[str, Any]


def task_lines(columns: MetricColumns, names: Sequence[str]) -> list[dict[str, Any]]:
    """Make a line for each task or suite of a run that has several.

    Args:
        names: Names of the run's tasks, in their order.

    Returns:
        List of {"name", "earned": change or None, "held_out": change or None, "now": mean reward of the last steps,
        "share" of the groups, "tone", "title"}. Empty for a run with one task.
    """
    tasks = _named(columns, r"task/([^/]+)/finished_reward_mean")
    suites = suites_of(columns)
    every = list(dict.fromkeys([*names, *tasks, *suites]))
    if len(every) < 2:
        return []
    lines: list[dict[str, Any]] = []
    rewards = RewardRange.of(columns)
    for name in every:
        metric, suite = f"task/{name}/finished_reward_mean", f"validation/{name}/reward_mean"
        earned, held_out = earned_change(columns, metric), held_out_change(columns, suite)
        recent = columns.values(metric)[-RECENT:]
        tone, title = _of_task(earned, held_out, recent, columns.count(metric))
        if fall(columns, metric) or fall(columns, suite):
            tone, title = "bad", "gets worse"
        elif recent and rewards.is_highest(fmean(recent)):
            tone, title = "good", "is solved"
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


def verdicts(columns: MetricColumns, tasks: Sequence[Mapping[str, Any]], dtype: str = "float32") -> list[Verdict]:
    """Make the verdicts on a run. The first says whether it learns, the others why it may not, the worst first. Empty
    without metrics.

    Args:
        tasks: Result of `task_lines`.
        dtype: Dtype of the policy's weights.
    """
    evidence = _Evidence.of(columns)
    learning = _learning(evidence)
    if learning is None:
        return []
    hidden = "The mean of all tasks hides it." if learning["tone"] == "good" else ""
    found = [*_of_tasks(columns, tasks, hidden), *_reasons(evidence, learns=learning["tone"] == "good", dtype=dtype)]
    reasons = sorted(found, key=lambda one: one["tone"] != "bad")
    if learning["tone"] == "bad" and not reasons:
        learning["text"] += " No metric shows a reason: read its rollouts, the median first."
    return [learning, *reasons]


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Changes of a run's rewards, from which the verdict on its learning follows."""

    columns: MetricColumns
    earned: Change | None  # in training
    held_out: Change | None
    earned_fall: Change | None
    held_out_fall: Change | None
    rewards: RewardRange
    entropy: float | None  # share of the first entropy that is left

    @classmethod
    def of(cls, columns: MetricColumns) -> _Evidence:
        metric = next((name for name in EARNED if columns.count(name)), EARNED[0])
        entropies = columns.values("train/entropy")
        known = len(entropies) > RECENT and fmean(entropies[:FEWEST]) > 0
        return cls(
            columns,
            earned_change(columns, metric),
            held_out_change(columns, HELD_OUT),
            fall(columns, metric),
            fall(columns, HELD_OUT),
            RewardRange.of(columns),
            fmean(entropies[-RECENT:]) / fmean(entropies[:FEWEST]) if known else None,
        )

    @property
    def changes(self) -> list[Change]:
        return [change for change in (self.held_out, self.earned) if change is not None]

    @property
    def text(self) -> str:
        return "; ".join(_change_text(change, self.columns) for change in self.changes)

    @property
    def steps(self) -> int:
        return max(map(self.columns.count, EARNED))

    @property
    def is_solved(self) -> bool:
        """Whether nearly all rollouts earn the highest reward, so that equal rewards and low entropy are no fault."""
        values = next((self.columns.values(name) for name in EARNED if self.columns.count(name)), list[float]())
        return bool(values) and self.rewards.is_highest(fmean(values[-RECENT:]))


def _learning(seen: _Evidence) -> Verdict | None:
    """Verdict on whether a run learns: the first one that applies."""
    columns = seen.columns
    if LEAGUE in columns:
        return _of_league(columns)
    if not any(columns.count(name) for name in (*EARNED, HELD_OUT)) and not suites_of(columns):
        return _of_loss(columns)
    rules = (_constant, _too_early, _memorizes, _solved, _fell, _rose)
    return next((verdict for rule in rules if (verdict := rule(seen)) is not None), None) or _unchanged(seen)


def _constant(seen: _Evidence) -> Verdict | None:
    """Verdict on a run whose rollouts all earn the same reward."""
    if seen.steps < FEWEST or not seen.rewards.is_one_value:
        return None
    title = f"Every rollout has earned the same reward, {_figure(seen.rewards.highest)}"
    text = f"Nothing can be learned from it: check the reward function. If it is right, try: {EQUAL_REWARDS_ADVICE}."
    return _verdict("bad", title, text, _rollouts(seen.columns, "its latest rollouts"))


def _too_early(seen: _Evidence) -> Verdict | None:
    if seen.changes:
        return None
    text = f"Steps so far: {seen.steps}. {2 * FEWEST} steps, or two validations, say more."
    return _verdict("", "Too early to tell whether it learns", text, _REWARDS)


def _memorizes(seen: _Evidence) -> Verdict | None:
    """Verdict on a gap that grows: training reward rises, and held-out reward does not."""
    earned, held_out = seen.earned, seen.held_out
    if earned is None or held_out is None or earned.direction <= 0 or seen.earned_fall is not None:
        return None
    falls = held_out.direction < 0 or seen.held_out_fall is not None
    grown, noise = earned.gain - held_out.gain, math.hypot(earned.noise, held_out.noise)
    if not falls and (held_out.direction > 0 or grown <= max(noise, 2 * earned.least)):
        return None
    if not falls and seen.rewards.is_highest(held_out.after, within=0.1):
        return None
    title = f"It memorizes its samples: training reward rises, held-out reward {'falls' if falls else 'does not'}"
    texts = [seen.text] if seen.held_out_fall is None else [seen.text, fall_text(seen.held_out_fall)]
    text = f"{'; '.join(texts)}. Try more samples, or fewer steps on the same ones (training.stop_at)."
    return _verdict("bad", title, text, _REWARDS)


def _solved(seen: _Evidence) -> Verdict | None:
    if not seen.is_solved or seen.held_out_fall is not None:
        return None
    text = f"{seen.text}. Nearly all rollouts earn the highest reward: harder samples would teach more."
    return _verdict("good", "It has solved its samples", text, _REWARDS)


def _fell(seen: _Evidence) -> Verdict | None:
    """Verdict on rewards that are below their best, or below the first ones, by more than noise."""
    falls = [change for change in (seen.held_out_fall, seen.earned_fall) if change is not None]
    held_out_rises = seen.held_out is not None and seen.held_out.direction > 0 and seen.held_out_fall is None
    if not falls and not held_out_rises:
        falls = [change for change in seen.changes if change.direction < 0]
    if not falls:
        return None
    text = f"{'; '.join(map(fall_text, falls))}. Try {LOST_REWARD_ADVICE}."
    if seen.earned_fall is not None and seen.entropy is not None and seen.entropy < _COLLAPSED:
        return _verdict("bad", f"It has collapsed: {seen.entropy:.0%} of its entropy is left", text, _REWARDS)
    if held_out_rises and (seen.earned is None or seen.earned.direction <= 0):
        text = f"{seen.text}. A curriculum with harder samples does this, too."
        return _verdict("warn", "Held-out reward rises, while training reward falls", text, _REWARDS)
    worst = min(falls, key=lambda change: change.gain)
    gain = max((worst.before - change.before for change in seen.changes if change.metric == worst.metric), default=0.0)
    if gain > -2 * worst.gain:
        return _verdict("warn", "It learned, then lost part of it", text, _REWARDS)
    return _verdict("bad", "It gets worse", text, _REWARDS)


def _rose(seen: _Evidence) -> Verdict | None:
    rises = [change for change in seen.changes if change.direction > 0]
    if not rises:
        return None
    if all(change.is_small for change in rises):
        text = f"{seen.text}. Try a higher training.lr, or more steps."
        return _verdict("warn", "It learns slowly", text, _REWARDS)
    return _verdict("good", "It learns", f"{seen.text}.", _REWARDS)


def _unchanged(seen: _Evidence) -> Verdict:
    if seen.steps < 2 * RECENT:
        text = f"{seen.text}: too little for its noise so far."
        return _verdict("", "Too early to tell whether it learns", text, _REWARDS)
    if len(_named(seen.columns, r"rollout/seat/([^/]+)/reward_mean")) > 1:
        text = f"{seen.text}. Where seats play against each other, a mean reward says nothing: play a league (league)."
        return _verdict("", "Its mean reward does not show whether it learns", text, _REWARDS)
    if all(change.is_noisy for change in seen.changes):
        text = f"{seen.text}. Try more groups in a step, more validation.num_prompts, or more steps."
        return _verdict("warn", "It is too noisy to tell whether it learns", text, _REWARDS)
    text = f"{seen.text}: within its noise, or too little to matter."
    return _verdict("bad", "It does not learn", text, _rollouts(seen.columns, "its latest rollouts"))


def _of_league(columns: MetricColumns) -> Verdict:
    """Verdict on a policy that plays against its earlier versions, whose mean reward may not change."""
    link = _curves(LEAGUE, "win rate by step")
    rates = columns.values(LEAGUE)
    recent = fmean(rates[-RECENT:]) if rates else 0.5
    text = f"It wins {recent:.0%} of its games against the versions in its league; 50% is no progress."
    if len(rates) < 2 * RECENT:
        return _verdict("", "Too early to tell whether it learns", text, link)
    if abs(recent - 0.5) < LEAST:
        return _verdict("bad", "It does not learn", text, link)
    return _verdict("good", "It learns", text, link) if recent > 0.5 else _verdict("bad", "It gets worse", text, link)


def _of_loss(columns: MetricColumns) -> Verdict | None:
    """Verdict on supervised training."""
    held_out, trained = held_out_change(columns, LOSSES[0]), earned_change(columns, LOSSES[1])
    change = held_out or trained
    if change is None:
        return _verdict("", "Too early to tell whether it learns", "", None) if columns.count(LOSSES[1]) else None
    link, text = _curves("loss", "loss by step"), _change_text(change, columns)
    losses = [(value, step) for step, value in finite_points(columns, change.metric)]
    least, best = min(losses)
    if held_out is not None and held_out.after - least > 0.1 * (held_out.before - least):
        text += f"; it was {_figure(least)} at step {best:.0f}. Try more demonstrations, or a smaller sft.steps."
        title = "It memorizes its demonstrations: held-out loss rises from its lowest"
        return _verdict("bad" if held_out.direction > 0 else "warn", title, text, link)
    if change.direction < 0:
        return _verdict("good", "It learns", f"{text}.", link)
    title = "It gets worse" if change.direction > 0 else "It does not learn"
    return _verdict("bad", title, f"{text}. Try another sft.lr.", link)


_NAMES = {HELD_OUT: "Held-out reward", LOSSES[0]: "Held-out loss", LOSSES[1]: "Loss"}


def _change_text(change: Change, columns: MetricColumns) -> str:
    error = "" if change.error is None else f" ± {change.error:.3f}"
    steps = f"steps {change.first_step:.0f} to {change.last_step:.0f}"
    if columns.count(change.metric) == 2:  # a line between them would look like steady progress
        steps = f"2 measurements, at steps {change.first_step:.0f} and {change.last_step:.0f}"
    return f"{_name(change)} {_figure(change.before)} → {_figure(change.after)} ({change.gain:+.3f}{error}, {steps})"


def fall_text(change: Change) -> str:
    """Describe a fall from the best: "Held-out reward 0.867 at step 40, 0.527 at step 60 (-0.340 ± 0.075)"."""
    error = "" if change.error is None else f" ± {change.error:.3f}"
    before, after = f"{_figure(change.before)} at step {change.first_step:.0f}", f"{_figure(change.after)} at step"
    return f"{_name(change)} {before}, {after} {change.last_step:.0f} ({change.gain:+.3f}{error})"


def _name(change: Change) -> str:
    return _NAMES.get(change.metric, "Reward in training")


def _of_task(
    earned: Change | None, held_out: Change | None, recent: Sequence[float], num_steps: int
) -> tuple[Tone, str]:
    if len(recent) >= FEWEST and max(map(abs, recent)) <= _NOTHING:
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


def _reasons(seen: _Evidence, *, learns: bool, dtype: str) -> Iterator[Verdict]:
    columns, is_solved = seen.columns, seen.is_solved
    for sign in SIGNS:
        recent = columns.values(sign.metric)[-RECENT:]
        scale = _ROUNDING if sign.of_rounding and dtype != "float32" else 1.0
        if not recent or (value := fmean(recent)) < scale * sign.warn or (is_solved and sign.of_learning):
            continue
        status = {} if sign.rollouts == "*" else {"status": sign.rollouts}
        link = _rollouts(columns, "these rollouts", **status) if sign.rollouts else _curves(sign.metric, "the curve")
        yield _verdict("bad" if value >= scale * sign.bad else "warn", sign.title.format(value), sign.advice, link)
    entropies, gradients = columns.values("train/entropy"), columns.values("train/grad_norm")
    if seen.entropy is not None and not is_solved:
        change = f"{fmean(entropies[:FEWEST]):.3g} at first, {fmean(entropies[-RECENT:]):.2g} now"
        link = _curves("train/entropy", "the curve")
        if seen.entropy < _VANISHED:
            text = "Siblings write the same. Try a lower training.lr, or a larger high of training.clip."
            yield _verdict("warn", f"The entropy has collapsed: {change}", text, link)
        if seen.entropy > _GROWN and not learns:
            text = "Answers get more random. Try a lower training.lr, or a larger training.kl_coef."
            yield _verdict("warn", f"The entropy grows: {change}", text, link)
    if skipped := num_skipped(columns.values("train/skipped_steps")):
        title = f"{skipped:.0f} step{'' if skipped == 1 else 's'} had no finite loss or gradient, and changed nothing"
        link = {"label": "their rollouts", "tab": "rollouts", "values": {"rollouts.dropped": "true"}}
        yield _verdict("warn", title, "training.max_skipped_steps says how many a run tolerates.", link)
    if len(gradients) >= FEWEST and not any(gradients[-RECENT:]) and not is_solved:
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


_REWARDS = _curves("reward_mean", "reward by step")


def _verdict(tone: Tone, title: str, text: str, link: Mapping[str, Any] | None) -> Verdict:
    return {"tone": tone, "title": title, "text": text, "link": link}


def _named(columns: MetricColumns, pattern: str) -> list[str]:
    return [match[1] for name in columns if (match := re.fullmatch(pattern, name))]


def _figure(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.3g}"
