"""Verdicts on runs of known shapes: they are those of a person, and the page, the report and the terminal agree."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from viewer.run_shapes import SHAPES, ramp, rise_and_fall, write_shape

from titan_rl.run.observability.summary import RunSummary, show_summary
from titan_rl.viewer.runs import RunReader


def summary_of(folder: Path) -> dict[str, Any]:
    """Summary of a run on the page and in the report."""
    with contextlib.closing(RunReader(folder)) as reader:
        return reader.summary()


def shown_in_terminal(folder: Path) -> str:
    shown = io.StringIO()
    show_summary(RunSummary(0.1, 0.2, 1, 1, 1.0, folder), shown)
    return " ".join(shown.getvalue().split())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_page_and_terminal_give_the_verdict_of_a_person(tmp_path: Path, name: str, seed: int) -> None:
    shape = SHAPES[name]
    summary = summary_of(write_shape(tmp_path / name, shape, seed=seed))
    verdict, *reasons = summary["verdicts"]
    text = f"{verdict['title']}. {verdict['text']}"
    assert shape.says.lower() in text.lower(), text
    assert verdict["tone"] == shape.tone, text
    everything = json.dumps([verdict, reasons, summary["warnings"]])
    assert not shape.never or shape.never not in everything
    assert verdict["title"] in shown_in_terminal(tmp_path / name)


def test_every_adapter_of_a_run_has_its_own_verdict(tmp_path: Path) -> None:
    summaries = {
        name: RunSummary(0.1, 0.2, 60, 1, 1.0, write_shape(tmp_path / "adapters" / name, SHAPES[name]))
        for name in ("learns", "collapsed", "solved")
    }
    shown = io.StringIO()
    show_summary(RunSummary.of_adapters(summaries, tmp_path, 1.0), shown)
    lines = {line.split()[1]: line for line in shown.getvalue().splitlines() if line.startswith("adapter ")}
    assert lines["learns"].endswith("; it learns")
    assert "; it has collapsed" in lines["collapsed"]
    assert lines["solved"].endswith("; it has solved its samples")
    for name, summary in summaries.items():
        assert SHAPES[name].says.lower() in summary_of(summary.run_dir)["verdicts"][0]["title"].lower()


@pytest.mark.parametrize(("dtype", "difference", "expected"), [
    ("float32", 0.012, True), ("bfloat16", 0.012, False), ("bfloat16", 0.2, True), ("float32", 1e-6, False),
])  # fmt: skip
def test_difference_of_logprobs_counts_only_beyond_the_rounding_of_the_dtype(
    tmp_path: Path, dtype: str, difference: float, expected: bool
) -> None:
    shape = replace(SHAPES["learns"], more={"train/on_policy_logprob_diff_mean": lambda _: difference})
    verdicts = summary_of(write_shape(tmp_path / "run", shape, dtype=dtype))["verdicts"]
    assert any("disagree on logprobs" in verdict["title"] for verdict in verdicts) == expected


def test_change_of_held_out_reward_counts_beyond_its_recorded_error(tmp_path: Path) -> None:
    """Repetitions of a few prompts make a mean less certain than as many distinct ones."""
    folder = write_shape(tmp_path / "run", replace(SHAPES["falls_from_the_start"], steps=5, validate_every=5))
    assert summary_of(folder)["verdicts"][0]["title"] == "It gets worse"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    few = [{**line, "validation/reward_error": 0.2} if "validation/num_groups" in line else line for line in lines]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in few))
    assert summary_of(folder)["verdicts"][0]["title"] == "Too early to tell whether it learns"


def test_held_out_loss_that_rises_from_its_lowest_is_overfitting(tmp_path: Path) -> None:
    lines = [
        {"step": step, "train/loss": 6.0 / (step + 1), "validation/loss": loss}
        for step, loss in enumerate([6.0, 3.0, 1.0, 0.9, 1.2, 2.0, 2.6])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (verdict,) = summary_of(tmp_path)["verdicts"]
    assert verdict["title"] == "It memorizes its demonstrations: held-out loss rises from its lowest"
    assert "it was 0.900 at step 3" in verdict["text"]


def test_mean_reward_of_seats_that_play_each_other_gives_no_alarm(tmp_path: Path) -> None:
    seats = {f"rollout/seat/{seat}/reward_mean": lambda _: 0.5 for seat in ("white", "black")}
    folder = write_shape(tmp_path / "run", replace(SHAPES["flat"], more=seats))
    assert summary_of(folder)["verdicts"][0]["tone"] == ""


def test_reward_tile_is_coloured_only_by_a_change_that_counts(tmp_path: Path) -> None:
    tones = {
        name: next(tile["tone"] for tile in summary_of(folder)["tiles"] if tile["label"] == "Reward")
        for name in ("learns", "flat", "collapsed")
        if (folder := write_shape(tmp_path / name, replace(SHAPES[name], num_groups=64)))
    }
    assert tones == {"learns": "good", "flat": "", "collapsed": "bad"}


def test_tasks_that_are_solved_or_lost_are_told_apart(tmp_path: Path) -> None:
    curves = {"easy": ramp(0.99, 0.99), "lost": rise_and_fall(0.3, 0.9, 0.4), "rising": ramp(0.2, 0.8)}
    tasks = {f"task/{name}/finished_reward_mean": curve for name, curve in curves.items()}
    folder = write_shape(tmp_path / "run", replace(SHAPES["learns"], more=tasks))
    titles = {
        line["name"]: (line["tone"], line["title"]) for line in summary_of(folder)["tasks"] if line["name"] in curves
    }
    assert titles == {"easy": ("good", "is solved"), "lost": ("bad", "gets worse"), "rising": ("good", "learns")}


@pytest.mark.parametrize(("name", "entropy", "expected"), [
    ("learns", (1.0, 0.01), "The entropy has collapsed"), ("learns", (1.0, 0.3), None), ("learns", (1.0, 3.0), None),
    ("solved", (1.0, 0.0001), None), ("flat", (1.0, 3.0), "The entropy grows"),
])  # fmt: skip
def test_entropy_is_judged_by_what_the_reward_does(
    tmp_path: Path, name: str, entropy: tuple[float, float], expected: str | None
) -> None:
    curve = lambda at: entropy[0] + (entropy[1] - entropy[0]) * min(2 * at, 1.0)  # noqa: E731
    shape = replace(SHAPES[name], more={"train/entropy": curve})
    titles = [verdict["title"] for verdict in summary_of(write_shape(tmp_path / "run", shape))["verdicts"][1:]]
    assert [title.partition(":")[0] for title in titles if "entropy" in title] == ([expected] if expected else [])


def test_solved_run_has_no_alarm(tmp_path: Path) -> None:
    shape = replace(SHAPES["solved"], more={"train/grad_norm": lambda at: 0.0 if at > 0.6 else 0.3})
    summary = summary_of(write_shape(tmp_path / "run", shape))
    assert (len(summary["verdicts"]), summary["warnings"]) == (1, [])
