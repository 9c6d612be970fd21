"""The same task, base model, data, batch, reward and steps on TRL's GRPOTrainer and here, in one run on one machine.

    python -m benchmarks.vs_trl [--seeds 3] [--steps 60] [--tasks short long_tail] [--staleness 2]

`short` sorts lists of 2 to 5 names. In `long_tail` one prompt in twelve has 24 names, so its answer is some ten times
as long as the others. Each task's base model is trained first and kept in build/vs_trl; TRL runs in an environment of
its own, build/trl-env, which has the same torch and transformers. Both systems generate at temperature 1 and clip and
average alike; TRL is synchronous, and here one generator samples from weights that are up to `--staleness` steps old.
The speedup is the ratio of seconds a step after the first, median over the seeds, TRL and this library in turn.
`reward_difference` is that of the last ten steps, mean over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from examples.alphabet_sort.data import Sample, draw_turns, name_pool
from examples.alphabet_sort.task import AlphabetSort

ROOT = Path(__file__).resolve().parent.parent
TRL = "trl==1.16.0"
GROUPS, SIBLINGS, LR, CONTEXT = 16, 8, 3e-4, 256
Curve = list[tuple[float, float]]  # of each step: reward, seconds since the start


class SortLists(AlphabetSort):
    """Single-turn lists, of which one in `long_every` is long."""

    min_turns: int = 1
    max_turns: int = 1
    pool_size: int = 24
    min_first_names: int = 2
    max_first_names: int = 5
    min_new_names: int = 1
    max_new_names: int = 1
    long_every: int = 0
    long_names: int = 24

    def _sample(self, key: str, *, held_out: bool) -> Sample:
        rng = random.Random(key)
        if not self.long_every or rng.randrange(self.long_every):
            return super()._sample(key, held_out=held_out)
        sort_by = rng.choice(("first", "last"))
        sizes = [(self.long_names, self.long_names)]
        return Sample(sort_by, draw_turns(rng, name_pool(self.pool_size), sizes, held_out=held_out))


TASKS = {
    "short": {"task": {}, "max_tokens": 32, "target": 1.2},
    "long_tail": {
        "task": {"max_first_names": 3, "pool_size": 48, "long_every": 12},
        "max_tokens": 140,
        "target": 2.0,
    },
}


def make_base(name: str) -> Path:
    folder = ROOT / "build" / "vs_trl" / name
    if (folder / "config.json").is_file():
        return folder
    print(f"training the base model of {name}", flush=True)
    settings = {
        "model": {"path": str(folder), "max_context": CONTEXT},
        "task": {"type": "benchmarks.vs_trl:SortLists"} | TASKS[name]["task"],
        "sft": {"demonstrations": 600 * 32, "shuffle": False},
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


def make_trl_environment() -> Path:
    """An interpreter that has TRL, and this one's torch and transformers."""
    folder = ROOT / "build" / "trl-env"
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        mine = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "shared.pth").write_text(mine)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", TRL], check=True, stderr=subprocess.DEVNULL)
        (folder / "done").touch()
    return python


def run_trl(python: Path, base: Path, name: str, seed: int, steps: int, folder: Path) -> Curve:
    settings = {"base": str(base), "out": str(folder / "trl"), "seed": seed, "steps": steps, "lr": LR}
    path = folder / "settings.json"
    path.write_text(json.dumps(settings | {"task": TASKS[name]["task"], "max_tokens": TASKS[name]["max_tokens"]}))
    output = subprocess.run(
        [str(python), "-m", "benchmarks.trl_run", str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},  # all cores: nothing else runs
        check=True,
        stdout=subprocess.PIPE,
        stderr=(folder / "trl.log").open("w"),
        text=True,
    ).stdout
    return json.loads(output.splitlines()[-1])


def run_ours(base: Path, name: str, seed: int, steps: int, staleness: int, folder: Path) -> Curve:
    config = folder / "config.toml"
    task = {"type": "benchmarks.vs_trl:SortLists"} | TASKS[name]["task"]
    settings: dict[str, Any] = {
        "model": {"path": str(base), "max_context": CONTEXT},
        "task": task,
        "sampling": {"max_tokens": TASKS[name]["max_tokens"]},
        "rollout": {"group_size": SIBLINGS, "max_turns": 1},
        "scheduling": {"groups_per_step": GROUPS, "max_staleness": staleness},
        "training": {"steps": steps, "lr": LR, "row_tokens": 4096, "rows_per_micro_batch": 1},
        "generation": {"num_generators": 1, "max_running": 2 * GROUPS * SIBLINGS, "kv_cache_gib": 0.5},
        "validation": {"num_prompts": 1, "samples_per_prompt": 1},
    }
    run_titan_rl("train", settings, config, folder / "ours.log", threads=1, seed=seed)
    records = [json.loads(line) for line in (folder / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    return [(r["rollout/reward_mean"], r["time_s"]) for r in records if "train/loss" in r]


def seconds_a_step(curve: Curve) -> float:
    return (curve[-1][1] - curve[0][1]) / (len(curve) - 1)


def measure(name: str, seeds: int, steps: int, staleness: int) -> None:
    base, python = make_base(name), make_trl_environment()
    speedups: list[float] = []
    gaps: list[float] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            trl = run_trl(python, base, name, seed, steps, Path(folder))
            ours = run_ours(base, name, seed, steps, staleness, Path(folder))
        speedups.append(seconds_a_step(trl) / seconds_a_step(ours))
        gaps.append(fmean(r for r, _ in ours[-10:]) - fmean(r for r, _ in trl[-10:]))
        print(f"{name}, seed {seed}: {seconds_a_step(trl):.2f} s a step on TRL, {seconds_a_step(ours):.2f} here")
        print("  step       " + "".join(f"{step:7d}" for step in range(10, steps + 1, 10)))
        for system, curve in (("TRL", trl), ("titan_rl", ours)):
            means = (fmean(r for r, _ in curve[step - 10 : step]) for step in range(10, steps + 1, 10))
            print(f"  {system:<11}" + "".join(f"{mean:7.3f}" for mean in means), flush=True)
    noise = stdev(gaps) if len(gaps) > 1 else 0.0
    speedup = {"name": f"speedup_{name}", "value": round(median(speedups), 2), "target": TASKS[name]["target"]}
    gap = {"name": f"reward_difference_{name}", "value": round(fmean(gaps), 3), "target": 0.0}
    print(json.dumps(speedup | {"unit": "ratio"}))
    print(json.dumps(gap | {"unit": f"reward, +- {noise:.3f} over seeds"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--staleness", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.tasks:
        measure(name, arguments.seeds, arguments.steps, arguments.staleness)


if __name__ == "__main__":
    main()
