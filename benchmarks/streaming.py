"""Streaming against synchronous training on the real stack: seconds until a reward, on alphabet-sort with a long tail.

    python benchmarks/streaming.py [--steps 20] [--seed 0] [--slow_s 3 0]

One conversation in twenty-five waits three seconds for a slow tool between its turns. The result mostly reflects this
wait, so each value of `--slow_s` is run and reported separately; with 0 s no conversation waits. A synchronous step
waits for the slowest of its 128 conversations; a streaming step trains on the groups that are done, and the others
continue. Both runs use the shipped CPU config with the same seed, data and number of steps, one after the other. Time
is that of training steps only, because start and validation are the same for both. Prints one JSON line per figure:
`name`, `value`, `target`, `unit`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from examples.alphabet_sort.data import Sample
from examples.alphabet_sort.task import AlphabetSort
from titan_rl.rollout.environment.types import TokenEnv, TokenObservation, TokenStep
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.run.directory import read_jsonl
from titan_rl.types import Completion

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

REPOSITORY = Path(__file__).parents[1]
SCHEDULES = {
    "synchronous": {"scheduling.max_staleness": 0},
    "streaming": {"scheduling.max_staleness": 1, "scheduling.oversample": 1.0},
}


class SlowTail(AlphabetSort):
    """Alphabet-sort in which some conversations wait for a slow tool."""

    slow_share: float = 0.04
    """Share of slow conversations."""
    slow_s: float = 3.0
    """Wait of a slow conversation before each turn but the first, in seconds."""

    def make_env(self, sample: Sample, renderer: Renderer) -> TokenEnv:
        env = super().make_env(sample, renderer)
        return SlowEnv(env, self.slow_s) if random.random() < self.slow_share else env


class SlowEnv:
    """A `TokenEnv` with a delay."""

    def __init__(self, env: TokenEnv, seconds: float) -> None:
        self._env = env
        self._seconds = seconds

    async def reset(self) -> TokenObservation:
        return await self._env.reset()

    async def step(self, completion: Completion) -> TokenStep:
        await asyncio.sleep(self._seconds)
        return await self._env.step(completion)

    async def close(self) -> None:
        await self._env.close()


def run(name: str, steps: int, seed: int, slow_s: float, folder: Path) -> list[dict[str, float]]:
    """Train once, and return the metrics of its steps."""
    settings = {
        "task.type": "benchmarks.streaming:SlowTail",
        "task.slow_s": slow_s,
        "training.steps": steps,
        "validation.interval": 5,
        "validation.num_prompts": 32,
        "seed": seed,
        "run_dir": str(folder / name),
        **SCHEDULES[name],
    }
    command = [sys.executable, "-m", "titan_rl.cli.main", "train", "examples/alphabet_sort/cpu.toml"]
    command += [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, stdout=subprocess.DEVNULL)
    return read_jsonl(folder / name / "latest" / "metrics.jsonl")


def curve(records: list[dict[str, float]]) -> list[tuple[float, float]]:
    """(Seconds of training, validation reward) of each validation."""
    seconds, points = 0.0, list[tuple[float, float]]()
    for record in records:
        seconds += record.get("time/step_s", 0.0)
        if "validation/reward_mean" in record:
            points.append((seconds, record["validation/reward_mean"]))
    return points


def seconds_to(points: list[tuple[float, float]], reward: float) -> float:
    """Seconds until the curve first reaches a reward, interpolated linearly between validations."""
    before_s, before = points[0]
    for after_s, after in points:
        if after >= reward:
            return before_s + (after_s - before_s) * (reward - before) / (after - before) if after > before else after_s
        before_s, before = after_s, after
    raise ValueError(f"the curve does not reach {reward}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow_s", type=float, nargs="+", default=[3.0, 0.0], help="seconds that a slow tool takes")
    arguments = parser.parse_args()
    for slow_s in arguments.slow_s:
        measure(arguments.steps, arguments.seed, slow_s)


def measure(steps: int, seed: int, slow_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        records = {name: run(name, steps, seed, slow_s, Path(folder)) for name in SCHEDULES}
    curves = {name: curve(found) for name, found in records.items()}
    for name, points in curves.items():
        trained = [record for record in records[name] if "train/loss" in record]
        age = fmean(record["scheduling/age_mean"] for record in trained)
        seconds = fmean(record["time/step_s"] for record in trained)
        print(f"slow tools of {slow_s:g} s, {name}: {seconds:.2f} s a step, mean age {age:.2f}")
        print("  " + "  ".join(f"{seconds:.0f} s {reward:.3f}" for seconds, reward in points))
    reward = min(max(reward for _, reward in points) for points in curves.values())
    ratio = seconds_to(curves["synchronous"], reward) / seconds_to(curves["streaming"], reward)
    print(f"to validation reward {reward:.3f}:")
    name = f"streaming_speedup_to_reward_slow_{slow_s:g}"
    print(json.dumps({"name": name, "value": round(ratio, 3), "target": 1.0, "unit": "ratio, at least"}), flush=True)


if __name__ == "__main__":
    main()
