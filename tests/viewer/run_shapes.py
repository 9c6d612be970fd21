"""Runs of known shapes, as files: rewards of 0 or 1 drawn with the probability that a curve gives each step, and the
verdict that a person gives on such a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

Curve = Callable[[float], float]
"""Value at a share of the run, from 0 at its first step to 1 at its last."""


def ramp(before: float, after: float, begin: float = 0.0, end: float = 1.0) -> Curve:
    """Curve that is flat before `begin` and after `end`, and a line between them."""
    return lambda at: before + (after - before) * min(max((at - begin) / (end - begin), 0.0), 1.0)


def rise_and_fall(first: float, best: float, last: float, *, peak: float = 0.55) -> Curve:
    rising, falling = ramp(first, best, 0.0, peak), ramp(best, last, peak + 0.1, 1.0)
    return lambda at: rising(at) if at <= peak + 0.05 else falling(at)


@dataclass(frozen=True)
class Shape:
    """A run: probabilities of a reward of 1 in training and on held-out samples, and the verdict of a person.

    Args:
        says: Words that the verdict must have; `never` are words that nothing on the page may have.
        tone: Tone of the verdict.
        entropy: First and last entropy of the policy.
        validate_every: Steps between validations; 0 validates before and after training.
        values: Rewards for failure and success.
        more: Further metrics of every step.
    """

    says: str
    tone: str
    earned: Curve
    held_out: Curve | None = None
    entropy: tuple[float, float] = (0.3, 0.2)
    never: str = ""
    steps: int = 60
    num_groups: int = 8
    group_size: int = 8
    validate_every: int = 10
    num_prompts: int = 64
    values: tuple[float, float] = (0.0, 1.0)
    more: Mapping[str, Curve] | None = None


SHAPES = {
    "solved": Shape("solved its samples", "good", ramp(0.3, 0.996, 0.0, 0.5), entropy=(0.3, 0.02), never="training.lr"),
    "collapsed": Shape("has collapsed", "bad", rise_and_fall(0.3, 0.9, 0.57), entropy=(0.3, 0.027)),
    "flat": Shape("does not learn", "bad", ramp(0.3, 0.3), steps=80, num_groups=32),
    "noisy": Shape(
        "too noisy to tell", "warn", ramp(0.3, 0.33), num_groups=2, group_size=2, num_prompts=4, validate_every=0
    ),
    "overfit": Shape("memorizes its samples", "bad", ramp(0.3, 0.9), held_out=rise_and_fall(0.3, 0.5, 0.22, peak=0.3)),
    "slow": Shape(
        "learns slowly", "warn", ramp(0.30, 0.36), steps=300, num_groups=16, validate_every=0, num_prompts=16
    ),
    "broken_reward": Shape("has earned the same", "bad", ramp(0.3, 0.3), values=(1.0, 1.0)),
    "drifting_entropy": Shape("does not learn", "bad", ramp(0.3, 0.3), steps=80, num_groups=32, entropy=(0.5, 3.0)),
    "league": Shape(
        "learns",
        "good",
        ramp(0.5, 0.5),
        values=(-1.0, 1.0),
        validate_every=-1,
        num_groups=16,
        more={"league/win_rate": ramp(0.5, 0.72, 0.0, 0.6), "league/versions": ramp(1, 12)},
    ),
    "learns": Shape("learns", "good", ramp(0.2, 0.7)),
    "overfit_from_the_start": Shape("memorizes its samples", "bad", ramp(0.3, 0.95), held_out=ramp(0.3, 0.3)),
    "partly_lost": Shape("lost part of it", "warn", rise_and_fall(0.1, 0.9, 0.72), num_groups=16),
    "tiny_gain": Shape(
        "does not learn", "bad", ramp(0.3, 0.305), steps=200, num_groups=512, num_prompts=2048, validate_every=0
    ),
    "two_validations": Shape("2 measurements", "good", ramp(0.2, 0.7), validate_every=0),
    "falls_from_the_start": Shape("gets worse", "bad", ramp(0.7, 0.3)),
    "harder_samples": Shape("learns", "good", ramp(0.5, 0.5), held_out=ramp(0.2, 0.8)),
    "much_harder_samples": Shape(
        "Held-out reward rises, while training reward falls", "warn", ramp(0.7, 0.3), held_out=ramp(0.2, 0.8)
    ),
    "solved_with_easy_held_out_samples": Shape(
        "solved its samples", "good", ramp(0.3, 0.996, 0.0, 0.5), held_out=ramp(0.95, 0.95)
    ),
}
"""Shapes by name. The run with several adapters is made of some of them."""


def write_shape(folder: Path, shape: Shape, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write the files of a run."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[task]\ntype = "tests:Sums"\n[model]\npath = "m"\ndtype = "{dtype}"\n[training]\nsteps = {shape.steps}\n'
    )
    (folder / "status.json").write_text(json.dumps({"state": "finished", "began": 0.0, "ended": 60.0}))
    lines: list[dict[str, Any]] = []
    every = shape.validate_every or shape.steps
    for step in range(shape.steps + 1):
        at = step / shape.steps
        if step:
            groups = [rewards(draw, shape, shape.earned(at), shape.group_size) for _ in range(shape.num_groups)]
            line = figures("rollout/", groups)
            line["rollout/finished_reward_mean"] = line["rollout/reward_mean"]
            line["rollout/zero_variance_groups"] = fmean(min(group) == max(group) for group in groups)
            line["train/entropy"] = ramp(*shape.entropy)(at) * draw.uniform(0.9, 1.1)
            line["train/grad_norm"] = 0.4 * (1 - line["rollout/zero_variance_groups"])
            line |= {name: curve(at) for name, curve in (shape.more or {}).items()}
            lines.append({"step": step, "time_s": float(step), "time/step_s": 1.0, **line})
        if shape.validate_every >= 0 and step % every == 0:
            chance = (shape.held_out or shape.earned)(at)
            groups = [rewards(draw, shape, chance, 4) for _ in range(shape.num_prompts)]
            error = {"validation/reward_error": stdev(map(fmean, groups)) / math.sqrt(len(groups))}
            lines.append({"step": step, "time_s": float(step), **figures("validation/", groups), **error})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def rewards(draw: random.Random, shape: Shape, chance: float, count: int) -> list[float]:
    """Rewards of a group. Its prompt is easier or harder than others."""
    failure, success = shape.values
    odds = math.log(chance / (1 - chance)) + draw.gauss(0.0, 0.7)
    own = 1 / (1 + math.exp(-odds))
    return [success if draw.random() < own else failure for _ in range(count)]


def figures(prefix: str, groups: list[list[float]]) -> dict[str, float]:
    flat = [reward for group in groups for reward in group]
    return {
        f"{prefix}num_groups": float(len(groups)),
        f"{prefix}num_rollouts": float(len(flat)),
        f"{prefix}reward_mean": fmean(flat),
        f"{prefix}reward_std": pstdev(flat),
        f"{prefix}reward_min": min(flat),
        f"{prefix}reward_max": max(flat),
    }
