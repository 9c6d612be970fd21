"""Games: exploitability of Kuhn poker by self-play, and a league against self-play at rock, paper, scissors.

    python -m benchmarks.league [--only kuhn_exploitability league_vs_selfplay] [--seeds 0 1 2 3 4]

`kuhn_exploitability` is the largest exploitability over the seeds after training `examples/kuhn_poker`, in chips per
hand. `league_vs_selfplay` trains `examples/league` twice for each seed, against its frozen versions and in self-play,
with the same settings otherwise. The value of a run is the mean exploitability over the validations of the second half
of training, as a policy that runs in circles passes near the equilibrium; the figure is the median over the seeds of
self-play's value over the league's.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.examples import make_base, run
from titan_rl.run.directory import read_jsonl

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


FIGURES = {"kuhn_exploitability": kuhn_exploitability, "league_vs_selfplay": league_vs_selfplay}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    for name in arguments.only:
        FIGURES[name](arguments.seeds)


if __name__ == "__main__":
    main()
