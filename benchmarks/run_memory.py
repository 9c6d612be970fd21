"""Memory growth of each process of a long run, in MB per 1,000 steps: real Monarch, vLLM and torchtitan, a tiny model.

    python -m benchmarks.run_memory [--steps 5000] [--warmup 500]

A step trains on 8 groups of 4 short answers, played by a rollout worker, so that messages and rollouts, rather than
tokens, could make memory grow. Private memory (`RssAnon`) of the controller and of each process below it is sampled
every five seconds. A process returns its free memory to the kernel once a minute, so samples between two returns
include free memory. Therefore the least sample of each window of 250 steps counts. The slope is that of a line fitted
to these minima after the warm-up by least squares.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

ROOT = Path(__file__).resolve().parent.parent
SAMPLED_EVERY_S = 5.0
WINDOW_STEPS = 250
TARGET_MB = 1.0
LOGS = {"rollout-worker-0": "rollout worker", "generator-0": "generator", "trainer": "trainer"}

SETTINGS = """
[model]
path = "base"
max_context = 64
[task]
type = "examples.arithmetic.task:Arithmetic"
[sft]
demonstrations = 2048
[sft.tiny_model]
parameters = 60_000
[training]
row_tokens = 512
rows_per_micro_batch = 8
[sampling]
max_tokens = 8
[rollout]
group_size = 4
num_workers = 1
[scheduling]
groups_per_step = 8
[generation]
num_generators = 1
kv_cache_gib = 0.25
[validation]
num_prompts = 0
[checkpoint]
interval_s = 60.0
"""


def processes_below(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes_below(int(child))


def role_of(pid: int, root: int) -> str | None:
    """Role of a process, by the file of its output."""
    if pid == root:
        return "controller"
    log = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    return LOGS.get(log)


def private_mb(pid: int) -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def sample(root: int, metrics: Path) -> tuple[int, dict[str, float]]:
    """Number of steps so far, and MB by role."""
    steps = metrics.read_bytes().count(b'"train/loss"') if metrics.exists() else 0
    memory: dict[str, float] = {}
    for pid in [*processes_below(root)]:
        try:
            if (role := role_of(pid, root)) is not None:
                memory[role] = max(memory.get(role, 0.0), private_mb(pid))
        except OSError:  # it has ended
            continue
    return steps, memory


def measure(steps: int, folder: Path) -> list[tuple[int, dict[str, float]]]:
    config, runs = folder / "config.toml", folder / "runs"
    config.write_text(SETTINGS)
    command = [sys.executable, "-m", "titan_rl.cli.main"]
    options = [str(config), "--quiet", "--run_dir", str(runs), "--training.steps"]
    quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    subprocess.run([*command, "sft", *options, "60"], check=True, **quiet)
    samples: list[tuple[int, dict[str, float]]] = []
    with subprocess.Popen([*command, "train", *options, str(steps)], **quiet) as run:
        while run.poll() is None:
            time.sleep(SAMPLED_EVERY_S)
            samples.append(sample(run.pid, runs / "latest" / "metrics.jsonl"))
    assert run.returncode == 0, "the run failed"
    return samples


def least_of_windows(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The sample with the least memory of each window of steps."""
    windows: dict[int, list[tuple[int, float]]] = {}
    for step, megabytes in points:
        windows.setdefault(step // WINDOW_STEPS, []).append((step, megabytes))
    return [min(window, key=lambda point: point[1]) for window in windows.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--warmup", type=int, default=500, help="steps after which memory counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(arguments.steps, Path(folder))
    counted = [(steps, memory) for steps, memory in samples if arguments.warmup <= steps < arguments.steps]
    for role in ("controller", *LOGS.values()):
        points = least_of_windows([(steps, memory[role]) for steps, memory in counted if role in memory])
        slope = 1000 * linear_regression(*zip(*points, strict=True)).slope
        first, last = points[0][1], points[-1][1]
        print(f"{role}:", *(f"{steps}:{megabytes:.0f}" for steps, megabytes in points))
        print(f"{role}: {first:.0f} MB after {points[0][0]} steps, {last:.0f} MB after {points[-1][0]}")
        figure = {"name": f"memory_slope_{role.replace(' ', '_')}", "value": round(slope, 2), "target": TARGET_MB}
        print(json.dumps(figure | {"unit": "MB per 1,000 steps, at most"}), flush=True)


if __name__ == "__main__":
    main()
