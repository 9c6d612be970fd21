"""Comparison with TRL's GRPOTrainer: the same task, base model, data, batch, reward and steps, on one machine.

    python -m benchmarks.vs_trl [--seeds 5] [--steps 60] [--tasks short long_tail tools] [--modes default vllm]

Tasks. `short` sorts lists of 2 to 5 names. In `long_tail` one prompt in twelve has 24 names, so its answer is about ten
times as long as the others. In `tools` the policy calls a calculator twice before it answers. Each task's base model is
trained first and kept in build/vs_trl.

Sides. TRL generates with transformers (`default`, its default), and with vLLM in the same process (`vllm`, its
colocated mode, whose weight sync is repaired for vLLM on a CPU; see `trl_run.py`). TRL is synchronous, and its stages
use both cores in turn. In titan_rl a vLLM engine, the trainer and the controller share the two cores, with a thread
each, and weights are up to `--staleness` steps old. All generate at temperature 1, and clip and average in the same
way.

Figures. Seconds are counted from the end of the first step, so the start does not count on either side; saving every
ten steps does. Each saved policy is evaluated afterwards, by the same program, on 64 held-out prompts with 4 answers
each. For each TRL mode:

- `speedup` is the ratio of seconds per step. Without a mode, it is relative to the mode that is faster for that seed.
- `reward_gap` is the difference of held-out reward after the last step, titan_rl's minus TRL's, with its standard error
  over the seeds.
- `area_between_curves` is the mean difference of held-out reward over the time that the faster side takes.
- `time_to_reward` is the ratio of seconds to a quarter, half and three quarters of the way from the base's reward to
  the lower of the two last ones.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from examples.alphabet_sort.data import Sample, draw_turns, name_pool
from examples.alphabet_sort.env import prompt
from examples.alphabet_sort.rubric import similarity
from examples.alphabet_sort.task import AlphabetSort
from examples.calculator.task import TOOLS, Calculator, Question

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

ROOT = Path(__file__).resolve().parent.parent
GROUPS, SIBLINGS, LR, CONTEXT = 16, 8, 3e-4, 256
SAVED_EVERY = 10  # steps
MODES = {"default": {}, "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": CONTEXT}}
"""How TRL generates: the arguments of `GRPOConfig`."""
LEVELS = (0.25, 0.5, 0.75)


@dataclass
class Curve:
    """Held-out reward of one run over the seconds since the end of its first step."""

    seconds_a_step: float
    points: list[tuple[float, float]]  # (seconds, reward), from the base at 0 s on

    def reward_at(self, seconds: float) -> float:
        """Reward at a time, interpolated linearly; after the end it is the last reward."""
        at = bisect.bisect_right([point[0] for point in self.points], seconds)
        if at == len(self.points):
            return self.points[-1][1]
        (left_s, left), (right_s, right) = self.points[at - 1], self.points[at]
        return left + (right - left) * (seconds - left_s) / (right_s - left_s)

    def seconds_to(self, reward: float) -> float:
        """Seconds until the curve first reaches a reward, which it must reach."""
        for (left_s, left), (right_s, right) in zip(self.points, self.points[1:], strict=False):
            if right >= reward > left:
                return left_s + (right_s - left_s) * (reward - left) / (right - left)
        return self.points[-1][0]


class SortLists(AlphabetSort):
    """Single-turn lists; one in `long_every` is long."""

    min_turns: int = 1
    max_turns: int = 1
    pool_size: int = 24
    min_first_names: int = 2
    max_first_names: int = 5
    min_new_names: int = 1
    max_new_names: int = 1
    long_every: int = 0
    long_names: int = 24

    def question(self, sample: Sample) -> str:
        return str(prompt(sample, 0)["content"])

    def score(self, sample: Sample, answer: str) -> float:
        return similarity(sample, 0, answer) ** self.power

    def _sample(self, key: str, *, held_out: bool) -> Sample:
        rng = random.Random(key)
        if not self.long_every or rng.randrange(self.long_every):
            return super()._sample(key, held_out=held_out)
        sort_by = rng.choice(("first", "last"))
        sizes = [(self.long_names, self.long_names)]
        return Sample(sort_by, draw_turns(rng, name_pool(self.pool_size), sizes, held_out=held_out))


class Calculations(Calculator):
    """Questions that take two calls of tools."""

    def question(self, sample: Question) -> str:
        return self.prompt(sample)

    def score(self, sample: Question, answer: str) -> float:
        return self.reward(sample, answer)


@dataclass(frozen=True)
class Comparison:
    """Task of the comparison.

    Attributes:
        kind: Class of the task.
        max_tokens: Largest number of tokens of an answer; with tools, of each turn.
        target: Least ratio of seconds per step.
        settings: Settings of the task.
        max_turns: Largest number of turns. TRL's answers may have as many tokens as `max_turns` turns.
        tools: Functions that the policy may call.
        demonstrations: Number of demonstrations from which the base model learns.
        tiny_model: Settings of the base model.
    """

    kind: type[SortLists | Calculations]
    max_tokens: int
    target: float
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    max_turns: int = 1
    tools: Sequence[Callable[..., int]] = ()
    demonstrations: int = 600 * 32
    tiny_model: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def table(self) -> dict[str, Any]:
        """The table `[task]` of a run."""
        return {"type": f"benchmarks.vs_trl:{self.kind.__name__}"} | self.settings

    def task(self) -> SortLists | Calculations:
        return self.kind(**self.settings)


TASKS = {
    "short": Comparison(SortLists, 32, 2.0),
    "long_tail": Comparison(SortLists, 140, 5.0, {"max_first_names": 3, "pool_size": 48, "long_every": 12}),
    "tools": Comparison(
        Calculations,
        48,
        3.0,
        max_turns=4,
        tools=tuple(TOOLS.values()),
        demonstrations=5760,
        tiny_model={"parameters": 500_000},
    ),
}


def make_base(name: str) -> Path:
    folder = ROOT / "build" / "vs_trl" / name
    if (folder / "config.json").is_file():
        return folder
    print(f"training the base model of {name}", flush=True)
    settings = {
        "model": {"path": str(folder), "max_context": CONTEXT},
        "task": TASKS[name].table,
        "sft": {"demonstrations": TASKS[name].demonstrations, "shuffle": False},
        "sft.tiny_model": TASKS[name].tiny_model,
        "training": {"row_tokens": 4096, "rows_per_micro_batch": 1},
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_titan_rl("sft", settings, folder.with_suffix(".toml"), folder.with_suffix(".log"), threads=os.cpu_count() or 1)
    return folder


def run_titan_rl(
    command: str, settings: dict[str, Any], config: Path, log: Path, *, threads: int, seed: int = 0
) -> None:
    lines = []
    for table, values in settings.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    config.write_text("\n".join(lines))
    options = ["--run_dir", str(config.parent / "runs"), "--seed", str(seed)]
    subprocess.run(
        [sys.executable, "-m", "titan_rl.cli.main", command, str(config), *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        check=True,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )


def run_trl(base: Path, name: str, mode: str, seed: int, steps: int, folder: Path) -> Curve:
    out = folder / f"trl-{mode}"
    settings = {"base": str(base), "out": str(out), "seed": seed, "steps": steps, "lr": LR, "mode": MODES[mode]}
    path = folder / "settings.json"
    path.write_text(json.dumps(settings | {"task": name}))
    output = run_part("train", path, folder / f"trl-{mode}.log", threads=os.cpu_count() or 1)  # nothing else runs
    seconds = json.loads(output.splitlines()[-1])
    return curve_of(base, name, seconds, {step: out / f"checkpoint-{step}" for step in saved_steps(steps)}, folder)


def run_part(part: str, settings: Path, log: Path, *, threads: int) -> str:
    """Run a part of `trl_run.py`, and return what it prints."""
    alone = {  # vLLM's engine in TRL's process, which is a world of one rank
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29591",
        "OMP_NUM_THREADS": str(threads),
    }
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_run", part, str(settings)],
        cwd=ROOT,
        env=os.environ | alone,
        check=True,
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
    ).stdout


def saved_steps(steps: int) -> list[int]:
    return [*range(SAVED_EVERY, steps, SAVED_EVERY), steps]


def curve_of(base: Path, name: str, seconds: list[float], policies: dict[int, Path], folder: Path) -> Curve:
    """Curve of a run, from the rewards of its saved policies.

    Args:
        seconds: at the end of each step.
        policies: Hugging Face folders by step.
    """
    path = folder / "evaluate.json"
    folders = [str(base), *(str(policy) for policy in policies.values())]
    path.write_text(json.dumps({"policies": folders, "task": name}))
    rewards = json.loads(
        run_part("evaluate", path, folder / "evaluate.log", threads=os.cpu_count() or 1).splitlines()[-1]
    )
    times = [0.0, *(seconds[step - 1] - seconds[0] for step in policies)]
    return Curve((seconds[-1] - seconds[0]) / (len(seconds) - 1), list(zip(times, rewards, strict=True)))


def run_ours(base: Path, name: str, seed: int, steps: int, staleness: int, folder: Path) -> Curve:
    from titan_rl.training.export import export_checkpoint  # TRL's process imports this module, too

    config = folder / "config.toml"
    task = TASKS[name]
    settings: dict[str, Any] = {
        "model": {"path": str(base), "max_context": CONTEXT},
        "task": task.table,
        "sampling": {"max_tokens": task.max_tokens},
        "rollout": {"group_size": SIBLINGS, "max_turns": task.max_turns},
        "scheduling": {"groups_per_step": GROUPS, "max_staleness": staleness},
        "training": {"steps": steps, "lr": LR, "row_tokens": 4096, "rows_per_micro_batch": 1},
        "generation": {"num_generators": 1, "max_running": 2 * GROUPS * SIBLINGS, "kv_cache_gib": 0.5},
        "validation": {"num_prompts": 0},
        "checkpoint": {"interval": SAVED_EVERY, "interval_s": 0.0, "keep": steps},
    }
    run_titan_rl("train", settings, config, folder / "ours.log", threads=1, seed=seed)
    run = folder / "runs" / "latest"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [record["time_s"] for record in records if "train/loss" in record]
    policies = {step: folder / "exported" / str(step) for step in saved_steps(steps)}
    (folder / "exported").mkdir()
    for step, policy in policies.items():
        checkpoint = run / "checkpoints" / f"step-{step:06}"
        export_checkpoint(base, checkpoint, policy, "float32", "auto")
    return curve_of(base, name, seconds, policies, folder)


def measure(name: str, modes: list[str], seeds: int, steps: int, staleness: int) -> None:
    base = make_base(name)
    ours: list[Curve] = []
    theirs: dict[str, list[Curve]] = {mode: [] for mode in modes}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            for mode in modes:
                theirs[mode].append(run_trl(base, name, mode, seed, steps, Path(folder)))
            ours.append(run_ours(base, name, seed, steps, staleness, Path(folder)))
        for system, curve in (*((f"TRL, {mode}", theirs[mode][-1]) for mode in modes), ("titan_rl", ours[-1])):
            points = "  ".join(f"{seconds:.0f} s {reward:.3f}" for seconds, reward in curve.points)
            print(f"{name}, seed {seed}, {system}: {curve.seconds_a_step:.2f} s a step; {points}", flush=True)
    for mode in modes:
        compare(f"{name}_vs_{mode}", ours, theirs[mode])
    fastest = [min((theirs[mode][seed] for mode in modes), key=lambda c: c.seconds_a_step) for seed in range(seeds)]
    ratios = [trl.seconds_a_step / mine.seconds_a_step for trl, mine in zip(fastest, ours, strict=True)]
    tell(f"speedup_{name}", median(ratios), TASKS[name].target, f"ratio, {min(ratios):.2f} to {max(ratios):.2f}")


def compare(name: str, ours: list[Curve], theirs: list[Curve]) -> None:
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [trl.seconds_a_step / mine.seconds_a_step for mine, trl in pairs]
    tell(f"speedup_{name}", median(ratios), None, f"ratio, {min(ratios):.2f} to {max(ratios):.2f}")
    gaps = [mine.points[-1][1] - trl.points[-1][1] for mine, trl in pairs]
    error = stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else float("nan")
    tell(f"reward_gap_{name}", fmean(gaps), 0.0, f"held-out reward, standard error {error:.3f}")
    areas: list[float] = []
    for mine, trl in pairs:
        until = min(mine.points[-1][0], trl.points[-1][0])
        times = [until * (k + 0.5) / 200 for k in range(200)]
        areas.append(fmean(mine.reward_at(t) - trl.reward_at(t) for t in times))
    tell(f"area_between_curves_{name}", fmean(areas), None, "mean difference of held-out reward over time")
    for level in LEVELS:
        ratios = []
        for mine, trl in pairs:
            begin, end = mine.points[0][1], min(mine.points[-1][1], trl.points[-1][1])
            reward = begin + level * (end - begin)
            if mine.seconds_to(reward) > 0:
                ratios.append(trl.seconds_to(reward) / mine.seconds_to(reward))
        if ratios:
            tell(f"time_to_reward_{level}_{name}", median(ratios), None, "ratio of seconds")


def tell(name: str, value: float, target: float | None, unit: str) -> None:
    print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--staleness", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.tasks:
        measure(name, arguments.modes, arguments.seeds, arguments.steps, arguments.staleness)


if __name__ == "__main__":
    main()
