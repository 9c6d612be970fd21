"""Learning results of the example tasks on CPU: mean reward of held-out rollouts before and after training.

For Kuhn poker the result is the exploitability instead.

    python -m benchmarks.examples [--only arithmetic calculator] [--seeds 0 1 2]

Creates an example's base model if it is missing, and trains it once per seed. Prints one JSON object per line:
{"name": ..., "value": ..., "target": ..., "unit": ...}. The value is the mean over the seeds after training; "before",
"after" and "seconds" (of the whole run) have the values of each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.run.directory import read_jsonl

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Target:
    """Target of an example.

    Args:
        metric: name of the validation metric.
    """

    value: float
    metric: str = "validation/reward_mean"
    unit: str = "reward, at least"


TARGETS = {
    "agent": Target(0.85),
    "alphabet_sort": Target(0.85),
    "arithmetic": Target(0.75),
    "bandit": Target(0.75),
    "calculator": Target(0.75),
    "distillation": Target(0.85),
    "gsm8k": Target(0.75),
    "guessing_game": Target(0.75),
    "judge": Target(0.85),
    "kuhn_poker": Target(0.1, "validation/exploitability", "chips a hand, at most"),
}


def run(*command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *command], cwd=REPOSITORY, env=environment, check=True, stdout=sys.stderr)


def make_base(name: str) -> None:
    """Make the base model of an example, and its teacher, where they are missing."""
    folder = REPOSITORY / "examples" / name
    if (folder / "base_model.py").exists() and not (folder / "base").is_dir():
        run(f"examples.{name}.base_model", "--out", str(folder / "base"))
    for toml, made in (("cpu.toml", "base"), ("teacher.toml", "teacher")):
        if (folder / toml).exists() and not (folder / made).is_dir():
            run("titan_rl.cli.main", "sft", str(folder / toml))


def train(name: str, seed: int) -> tuple[float, float, float]:
    """Train an example and return (before, after, seconds); before and after are its metric in the first and last
    validation.
    """
    metric = TARGETS[name].metric
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        config = f"examples/{name}/cpu.toml"
        run("titan_rl.cli.main", "train", config, "--seed", str(seed), "--run_dir", folder)
        seconds = time.monotonic() - began
        records: list[dict[str, Any]] = read_jsonl(Path(folder) / "latest" / "metrics.jsonl")
    before, *_, after = (record[metric] for record in records if metric in record)
    return before, after, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    for name in arguments.only:
        make_base(name)
        before, after, seconds = zip(*(train(name, seed) for seed in arguments.seeds), strict=True)
        target = TARGETS[name]
        figure = {
            "name": f"{name}_{target.metric.partition('/')[2].removesuffix('_mean')}",
            "value": round(fmean(after), 3),
            "target": target.value,
            "unit": target.unit,
            "before": [round(each, 3) for each in before],
            "after": [round(each, 3) for each in after],
            "seconds": [round(each) for each in seconds],
        }
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
