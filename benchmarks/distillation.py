"""On-policy distillation against GRPO: optimizer steps until a held-out reward is reached, and the teacher's share.

    python -m benchmarks.distillation [--seeds 0 1 2 3 4] [--target 0.5]

The task is `examples/distillation/sparse.toml`: four sums in a prompt, and a reward only if all are right. Three runs
for each seed start from the same student, which knows sums and often gives up, and are validated as they go:

    grpo          learns from the rewards
    distillation  learns from the teacher's logprobs (reverse KL on the sampled token), with the same settings otherwise
    teacher_free  has neither: a fixed negative advantage on improbable tokens (arXiv:2608.31046)

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}. `distill_steps_vs_grpo` is the
median over the seeds of GRPO's steps over those of distillation. A run of GRPO that does not reach it counts with
all of its steps; if distillation does not reach it, the ratio is 0. `teacher_share_of_step` is the share of a
step's time that the teacher costs: 1 minus GRPO's median step over that of distillation, validation not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.examples import REPOSITORY, run
from titan_rl.run.directory import read_jsonl
from titan_rl.training.losses import ClipRange, LossTokens, TokenLoss, without_bounds

SUBJECT = ("titan_rl/training", "titan_rl/run/open_teachers.py")
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

EXAMPLE = "examples/distillation/sparse.toml"
TEACHER = "examples/distillation/sparse_teacher.toml"
FOLDER = REPOSITORY / "examples" / "distillation" / "sparse"

IMPROBABLE = -2.3
"""Logprob below which the teacher-free baseline calls a token improbable: a probability of 0.1."""

SETTINGS = {
    "grpo": ("--validation.interval", "4", "--training.algorithm", "grpo", "--training.teacher", ""),
    "distillation": ("--validation.interval", "1"),
    "teacher_free": (
        *("--validation.interval", "4", "--training.algorithm", "reinforce", "--training.teacher", ""),
        *("--training.loss", "benchmarks.distillation:improbable_loss"),
    ),
}
MOST_STEPS = {"grpo": 120, "distillation": 24, "teacher_free": 60}
REWARD = "validation/reward_mean"
STEP_S = "time/step_s"


def improbable_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """`log pi_theta(t)` of tokens that were improbable when they were sampled: a fixed advantage of -1."""
    improbable_N = tokens.proximal_logprobs_N < IMPROBABLE
    return without_bounds(tokens.logprobs_N.where(improbable_N, tokens.logprobs_N * 0))


def records_of(kind: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Metrics of one run, which stays in the folder."""
    settings = ("--seed", str(seed), "--run_dir", str(folder), *SETTINGS[kind])
    run("titan_rl.cli.main", "train", EXAMPLE, "--training.steps", str(MOST_STEPS[kind]), *settings)
    return read_jsonl(folder / "latest" / "metrics.jsonl")


def steps_to(records: list[dict[str, Any]], target: float) -> int | None:
    """First step whose validation reaches the target, at least 1; None if none does."""
    reached = (record["step"] for record in records if record.get(REWARD, 0.0) >= target)
    return next((max(1, step) for step in reached), None)


def speedup(grpo: int | None, taught: int | None) -> float:
    """GRPO's steps over those of distillation."""
    return 0.0 if taught is None else (MOST_STEPS["grpo"] if grpo is None else grpo) / taught


def step_s(records: list[dict[str, Any]]) -> float:
    """Median time of a step, without the first two."""
    return median([record[STEP_S] for record in records if STEP_S in record][2:])


def figure(name: str, value: float, target: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--target", type=float, default=0.5, help="held-out reward to reach")
    arguments = parser.parse_args()
    for made, toml in (("base", EXAMPLE), ("teacher", TEACHER)):
        if not (FOLDER / made).is_dir():
            run("titan_rl.cli.main", "sft", toml)
    steps: dict[str, list[int | None]] = {kind: [] for kind in SETTINGS}
    last: dict[str, list[float]] = {kind: [] for kind in SETTINGS}
    seconds: dict[str, list[float]] = {kind: [] for kind in SETTINGS}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for kind in SETTINGS:
                records = records_of(kind, seed, Path(folder) / kind)
                steps[kind].append(steps_to(records, arguments.target))
                last[kind].append(round([record[REWARD] for record in records if REWARD in record][-1], 3))
                seconds[kind].append(step_s(records))
                print(f"seed {seed}, {kind}: {steps[kind][-1]} steps, {last[kind][-1]} at the end", file=sys.stderr)
    ratios = [speedup(*pair) for pair in zip(steps["grpo"], steps["distillation"], strict=True)]
    figure(
        "distill_steps_vs_grpo",
        median(ratios),
        5,
        f"GRPO's steps to a held-out reward of {arguments.target:g} over those of distillation, at least",
        steps=steps,
        rewards_at_the_end=last,
    )
    shares = [1 - rl / taught for rl, taught in zip(seconds["grpo"], seconds["distillation"], strict=True)]
    figure(
        "teacher_share_of_step",
        max(0.0, median(shares)),
        0.15,
        "share of a step's time, at most",
        step_s={kind: [round(value, 3) for value in each] for kind, each in seconds.items()},
    )


if __name__ == "__main__":
    main()
