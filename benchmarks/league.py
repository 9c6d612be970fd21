"""Games: exploitability of Kuhn poker by self-play, and a league against self-play at rock, paper, scissors.

    python -m benchmarks.league [--only league_vs_selfplay ...] [--seeds 0 1 2 3 4]

`kuhn_exploitability` is the largest exploitability over the seeds after training `examples/kuhn_poker`, in chips per
hand. `league_vs_selfplay` trains `examples/league` twice for each seed, against its frozen versions and in self-play,
with the same settings otherwise. The value of a run is the mean exploitability over the validations of the second half
of training, as a policy that runs in circles passes near the equilibrium; the figure is the median over the seeds of
self-play's value over the league's.

`tabular_league_vs_selfplay` is the same figure for a policy of three logits that learns from sampled games, by the
policy gradient with momentum. Its opponents are chosen by the `LeagueCurriculum` of a run. It takes seconds.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.examples import make_base, run
from examples.league.task import BEGINNER, MOVES, exploitability, points
from titan_rl.rollout.rewards.advantages import group_mean
from titan_rl.run.directory import read_jsonl
from titan_rl.scheduling.curriculum import InOrder
from titan_rl.tasks.league import LeagueCurriculum, LeagueSeat, split_number

SUBJECT = ("titan_rl/training", "titan_rl/tasks", "titan_rl/scheduling", "examples/kuhn_poker", "examples/league")
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

METRIC = "validation/exploitability"


def exploitabilities(example: str, seed: int, *options: str) -> list[tuple[int, float]]:
    """Step and exploitability of each validation of a run."""
    make_base(example)
    with tempfile.TemporaryDirectory() as folder:
        settings = ("--seed", str(seed), "--run_dir", folder, *options)
        run("titan_rl.cli.main", "train", f"examples/{example}/cpu.toml", *settings)
        records = read_jsonl(Path(folder) / "latest" / "metrics.jsonl")
    return [(int(record["step"]), record[METRIC]) for record in records if METRIC in record]


def second_half(measured: Sequence[tuple[int, float]]) -> float:
    """Mean over the validations of the second half of the steps."""
    return fmean(value for step, value in measured if 2 * step > measured[-1][0])


def figure(name: str, value: float, target: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "target": target, "unit": unit, **more}), flush=True)


def kuhn_exploitability(seeds: Sequence[int]) -> None:
    """Exploitability of Kuhn poker after training."""
    last: list[float] = []
    for seed in seeds:
        last.append(round(exploitabilities("kuhn_poker", seed)[-1][1], 4))
        print(f"seed {seed}: {last[-1]}", file=sys.stderr)
    figure("kuhn_exploitability", max(last), 0.05, "chips per hand, the largest of the seeds, at most", seeds=last)


def league_vs_selfplay(seeds: Sequence[int]) -> None:
    """Exploitability of self-play over that of a league, at a game in which self-play runs in circles."""
    league, alone = list[float](), list[float]()
    for seed in seeds:
        league.append(round(second_half(exploitabilities("league", seed)), 4))
        alone.append(round(second_half(exploitabilities("league", seed, "--task.seats.second", "policy")), 4))
        print(f"seed {seed}: league {league[-1]}, self-play {alone[-1]}", file=sys.stderr)
    ratios = [circling / against for circling, against in zip(alone, league, strict=True)]
    unit = "mean exploitability of self-play in the second half of training over that of the league, at least"
    figure("league_vs_selfplay", median(ratios), 2, unit, league=league, selfplay=alone)


STEPS, GROUPS, SIZE, EVERY = 400, 8, 16, 4
LR, MOMENTUM, KL = 0.3, 0.9, 0.3


def shares_of(logits: Sequence[float]) -> list[float]:
    """Softmax.  # [3]"""
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def tabular(seed: int, settings: LeagueSeat | None) -> float:
    """Mean exploitability of a policy of three logits over the second half of training.

    Args:
        settings: Of the league; None for self-play.
    """
    chance = random.Random(seed)
    start = [math.log(share) for share in BEGINNER]
    logits, momentum, frozen = list(start), [0.0] * len(MOVES), {0: list(start)}
    league = None if settings is None else LeagueCurriculum(InOrder(), settings, seed)
    state = None if league is None else league.begin()
    measured: list[tuple[int, float]] = []
    for step in range(1, STEPS + 1):
        own = shares_of(logits)
        gradient = [-KL * share * (math.log(share) - logit) for share, logit in zip(own, start, strict=True)]
        mean = sum(gradient)
        gradient = [part - share * mean for part, share in zip(gradient, own, strict=True)]
        for _ in range(GROUPS):
            number = 0 if league is None or state is None else league.next_sample(state)
            opponent = split_number(number)[1]
            other = own if opponent is None else shares_of(frozen[opponent])
            moves = chance.choices(range(3), own, k=SIZE)
            rewards = [
                points(MOVES[a], MOVES[b]) for a, b in zip(moves, chance.choices(range(3), other, k=SIZE), strict=True)
            ]
            for move, advantage in zip(moves, group_mean(rewards), strict=True):
                for k in range(3):
                    gradient[k] += advantage * ((k == move) - own[k]) / (GROUPS * SIZE)
            if league is not None and state is not None:
                league.given(state, number)
                league.finished(state, number, rewards)
        momentum = [MOMENTUM * before + part for before, part in zip(momentum, gradient, strict=True)]
        logits = [logit + LR * part for logit, part in zip(logits, momentum, strict=True)]
        if league is not None and state is not None and step % EVERY == 0:
            frozen[step] = list(logits)
            league.frozen(state, step)
        measured.append((step, exploitability(shares_of(logits))))
    return second_half(measured)


def tabular_league_vs_selfplay(seeds: Sequence[int]) -> None:
    """The figure of `league_vs_selfplay` for a policy of three logits."""
    settings = LeagueSeat(league="hard", every=EVERY, self_play=0.0)
    league = [round(tabular(seed, settings), 4) for seed in seeds]
    alone = [round(tabular(seed, None), 4) for seed in seeds]
    ratios = [circling / against for circling, against in zip(alone, league, strict=True)]
    unit = "mean exploitability of self-play in the second half of training over that of the league, at least"
    figure("tabular_league_vs_selfplay", median(ratios), 2, unit, league=league, selfplay=alone)


FIGURES = {
    "kuhn_exploitability": kuhn_exploitability,
    "league_vs_selfplay": league_vs_selfplay,
    "tabular_league_vs_selfplay": tabular_league_vs_selfplay,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    for name in arguments.only:
        FIGURES[name](arguments.seeds)


if __name__ == "__main__":
    main()
