"""On-policy distillation against GRPO: optimizer steps until a held-out reward is reached, and the teacher's share.

    python -m benchmarks.distillation [--seeds 0 1 2 3 4] [--target 0.9]

The student of `examples/distillation` knows sums, and often gives up; its teacher never does. Both are made if they are
missing. Three runs for each seed start from the same student, and are validated after every step:

    grpo          learns from the rewards
    distillation  learns from the teacher's logprobs (reverse KL on the sampled token), with the same learning rate
    teacher_free  has neither: a fixed negative advantage on improbable tokens (arXiv:2608.31046)

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}. `distill_steps_vs_grpo` is the
median over the seeds of GRPO's steps over those of distillation, counting a run that does not get there as having
taken all of its steps. `teacher_share_of_step` is the share of a step's time that the teacher costs: 1 minus GRPO's
median step over that of distillation, both without validation.
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

SUBJECT = ("titan_rl/training", "titan_rl/run/teachers.py")
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

EXAMPLE = "examples/distillation/cpu.toml"
TEACHER = "examples/distillation/teacher.toml"

IMPROBABLE = -2.3
"""Logprob below which the teacher-free baseline calls a token improbable: a probability of 0.1."""

WITHOUT_TEACHER = ("--training.distill_coef", "0", "--training.teacher", "")

KINDS = {
    "grpo": (*WITHOUT_TEACHER, "--training.algorithm", "grpo"),
    "distillation": (),
    "teacher_free": (
        *WITHOUT_TEACHER,
        *("--training.algorithm", "reinforce", "--training.loss", "benchmarks.distillation:improbable_loss"),
    ),
}
MOST_STEPS = {"grpo": 60, "distillation": 20, "teacher_free": 20}
REWARD = "validation/reward_mean"
STEP_S = "time/step_s"


def improbable_loss(tokens: LossTokens, clip: ClipRange) -> TokenLoss:
    """`log pi_theta(t)` of tokens that were improbable when they were sampled: a fixed advantage of -1."""
    improbable_N = tokens.proximal_logprobs_N < IMPROBABLE
    return without_bounds(tokens.logprobs_N.where(improbable_N, tokens.logprobs_N * 0))


def make_models() -> None:
    """Make the student and the teacher where they are missing."""
    folder = REPOSITORY / "examples" / "distillation"
    if not (folder / "base").is_dir():
        run("titan_rl.cli.main", "sft", EXAMPLE)
    if not (folder / "teacher").is_dir():
        run("titan_rl.cli.main", "sft", TEACHER)


def records_of(kind: str, seed: int, *options: str) -> list[dict[str, Any]]:
    """Metrics of one run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("--seed", str(seed), "--run_dir", folder, *options, *KINDS[kind])
        run("titan_rl.cli.main", "train", EXAMPLE, "--training.steps", str(MOST_STEPS[kind]), *settings)
        return read_jsonl(Path(folder) / "latest" / "metrics.jsonl")


def steps_to(records: list[dict[str, Any]], target: float, most: int) -> int:
    """First step whose validation reaches the target; all steps if none does."""
    reached = (record["step"] for record in records if record.get(REWARD, 0.0) >= target)
    return max(1, next(reached, most))


def figure(name: str, value: float, target: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit, **more}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--target", type=float, default=0.9, help="held-out reward to reach")
    arguments = parser.parse_args()
    make_models()
    steps: dict[str, list[int]] = {kind: [] for kind in KINDS}
    last: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in arguments.seeds:
        for kind in KINDS:
            records = records_of(kind, seed, "--validation.interval", "1")
            rewards = [record[REWARD] for record in records if REWARD in record]
            steps[kind].append(steps_to(records, arguments.target, MOST_STEPS[kind]))
            last[kind].append(round(rewards[-1], 3))
            print(f"seed {seed}, {kind}: {steps[kind][-1]} steps, {last[kind][-1]} at the end", file=sys.stderr)
    ratios = [grpo / taught for grpo, taught in zip(steps["grpo"], steps["distillation"], strict=True)]
    figure(
        "distill_steps_vs_grpo",
        median(ratios),
        5,
        f"GRPO's steps to a held-out reward of {arguments.target:g} over those of distillation, at least",
        steps=steps,
        rewards_at_the_end=last,
    )
    seconds: dict[str, float] = {}
    for kind in ("grpo", "distillation"):
        records = records_of(kind, arguments.seeds[0], "--training.steps", "20")
        seconds[kind] = median([record[STEP_S] for record in records if STEP_S in record][2:])
    figure(
        "teacher_share_of_step",
        max(0.0, 1 - seconds["grpo"] / seconds["distillation"]),
        0.15,
        "share of a step's time, at most",
        step_s={kind: round(value, 3) for kind, value in seconds.items()},
    )


if __name__ == "__main__":
    main()
