"""Verdicts on a run: whether it learns, reasons if not, and links to the evidence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.verdicts import RECENT, task_lines, verdicts


def columns(steps: int, **figures: Any) -> MetricColumns:
    """Make metrics. Each is a number or a function of the step; "__" in its name stands for "/"."""
    found = MetricColumns()
    for step in range(1, steps + 1):
        values = {name.replace("__", "/"): value(step) if callable(value) else value for name, value in figures.items()}
        found.add({"step": step, **values})
    return found


def noisy(first: float, last: float, steps: int) -> Any:
    return lambda step: first + (last - first) * (step - 1) / (steps - 1) + 0.02 * math.sin(7 * step)


def tones_and_titles(found: MetricColumns, *tasks: str) -> list[tuple[str, str]]:
    return [(one["tone"], one["title"]) for one in verdicts(found, task_lines(found, tasks))]


@pytest.mark.parametrize(
    ("first", "last", "tone", "title"),
    [
        (0.3, 0.8, "good", "It learns"),
        (0.3, 0.3, "bad", "It does not learn"),
        (0.8, 0.3, "bad", "It gets worse"),
    ],
)
def test_verdict_requires_a_change_beyond_step_noise(first: float, last: float, tone: str, title: str) -> None:
    found = columns(40, rollout__finished_reward_mean=noisy(first, last, 40))
    assert tones_and_titles(found) == [(tone, title)]


def test_verdict_with_few_or_no_steps() -> None:
    assert tones_and_titles(columns(5, rollout__reward_mean=0.5)) == [("", "Too early to tell whether it learns")]
    assert tones_and_titles(MetricColumns()) == []


def test_noise_of_few_steps_or_prompts_gives_no_verdict() -> None:
    found = columns(12, rollout__finished_reward_mean=noisy(0.3, 0.3, 12))
    for step, reward in ((0, 0.30), (12, 0.45)):
        suites = {f"validation/{suite}/reward_mean": reward for suite in ("long", "short")}
        errors = {f"validation/{suite}/reward_error": 0.1 for suite in ("long", "short")}
        found.add({"step": step, "validation/reward_mean": reward, "validation/reward_error": 0.07, **suites, **errors})
    assert tones_and_titles(found, "long", "short") == [("", "Too early to tell whether it learns")]
    lines = task_lines(found, ["long", "short"])
    assert [line["title"] for line in lines] == ["too early to tell", "too early to tell"]


def test_falling_held_out_reward_is_reported_as_overfitting() -> None:
    found = columns(40, rollout__finished_reward_mean=noisy(0.3, 0.8, 40))
    for step, reward in ((0, 0.5), (40, 0.3)):
        held_out = {"validation/reward_mean": reward, "validation/reward_std": 0.2, "validation/reward_error": 0.025}
        found.add({"step": step, **held_out})
    assert tones_and_titles(found)[0] == (
        "bad",
        "It memorizes its samples: training reward rises, held-out reward falls",
    )


def test_supervised_training_is_judged_by_its_loss() -> None:
    found = MetricColumns()
    for step, loss in ((0, 5.8), (48, 0.9)):
        found.add({"step": step, "train/loss": loss, "validation/loss": loss})
    (verdict,) = verdicts(found, [])
    assert (verdict["tone"], verdict["title"]) == ("good", "It learns")
    assert "Held-out loss 5.800 → 0.900" in verdict["text"]


def test_task_with_zero_reward_is_not_hidden_by_the_mean() -> None:
    figures = {
        "rollout__finished_reward_mean": noisy(0.2, 0.5, 40),
        "task/sort__finished_reward_mean": noisy(0.4, 0.99, 40),
        "task/count__finished_reward_mean": 0.0,
    }
    found = columns(40, **figures)
    lines = {line["name"]: (line["tone"], line["title"]) for line in task_lines(found, ["sort", "count"])}
    assert lines == {"sort": ("good", "learns"), "count": ("bad", "earns nothing")}
    learning, of_task = verdicts(found, task_lines(found, ["sort", "count"]))
    assert learning["tone"] == "good"
    assert of_task["title"] == "The task count earns nothing"
    assert of_task["text"].startswith("The mean of all tasks hides it. Its reward in the last steps is 0.000. Try: ")
    flat = columns(40, **figures | {"rollout__finished_reward_mean": 0.3})
    of_task = next(
        one for one in verdicts(flat, task_lines(flat, [])) if one["title"] == "The task count earns nothing"
    )
    assert of_task["text"].startswith("Its reward in the last steps is 0.000.")
    assert of_task["link"]["values"] == {"rollouts.task": "count", "rollouts.step_min": 31, "rollouts.phase": "train"}
    assert task_lines(columns(40, **{"task/sort__finished_reward_mean": 0.5}), ["sort"]) == []


@pytest.mark.parametrize(
    ("metric", "value", "tone", "says", "link"),
    [
        ("rollout/zero_variance_groups", 1.0, "bad", "100% of the groups teach nothing", {"rollouts.step_min": 31}),
        ("rollout/status/error_parse", 0.2, "warn", "20% of the answers", {"rollouts.status": "error_parse"}),
        ("rollout/status/truncated_length", 0.6, "bad", "60% of the rollouts", {"rollouts.status": "truncated_length"}),
        ("rollout/status/error_env", 0.1, "warn", "10% of the rollouts", {"rollouts.status": "error_env"}),
        ("train/approx_kl", 0.2, "warn", "a KL of 0.2", {"metrics": "train/approx_kl"}),
        ("train/skipped_steps", 2.0, "warn", "2 steps had no finite loss", {"rollouts.dropped": "true"}),
        ("train/grad_norm", 0.0, "bad", "The gradient is zero", {"metrics": "train/grad_norm"}),
    ],
)
def test_reasons_link_to_their_evidence(metric: str, value: float, tone: str, says: str, link: dict[str, Any]) -> None:
    found = columns(40, **{"rollout__finished_reward_mean": 0.3, metric: value})
    reason = next(one for one in verdicts(found, []) if says in one["title"])
    assert reason["tone"] == tone
    assert link.items() <= reason["link"]["values"].items()
    assert reason["link"]["tab"] == ("curves" if "metrics" in link else "rollouts")
    if metric == "train/skipped_steps":  # counts the whole run
        return
    early = MetricColumns()
    for step in range(1, 41):
        early.add({"step": step, "rollout/finished_reward_mean": 0.3, metric: value if step <= 40 - RECENT else 0.01})
    assert not [one for one in verdicts(early, []) if says in one["title"]], "only the last steps count"
