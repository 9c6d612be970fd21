"""Comparison with SkyRL: the short task of `vs_trl.py`, with the same base model, prompts and batch, on one machine.

    python3.12 -m venv build/skyrl
    build/skyrl/bin/pip install "skyrl[jax,tinker]==0.4.0" aiohttp uv msgspec cachetools
    python -m benchmarks.vs_skyrl [--environment build/skyrl] [--seeds 5] [--steps 60]

SkyRL's trainers on PyTorch need a GPU. Its JAX backend does not: its server samples and trains in turn, with both
cores, and the loop that uses it is `skyrl_run.py`. It trains adapters of rank 32 only, so there `speedup` compares
with a smaller update than titan_rl's, which trains all weights, as in `vs_trl.py`.

`speedup_skyrl` is the ratio of seconds per step, SkyRL's over titan_rl's, counted from the end of the first step.
SkyRL compiles for each new length of prompts and answers, which takes seconds; `speedup_skyrl_compiled` is relative to
its median step, which compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import fmean, median

from benchmarks.processes import end
from benchmarks.vs_trl import ROOT, make_base, run_ours, tell

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""


def run_skyrl(environment: Path, base: Path, seed: int, steps: int, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first, and the mean reward of each step."""
    path = folder / "settings.json"
    path.write_text(json.dumps({"base": str(base), "task": "short", "seed": seed, "steps": steps}))
    with (folder / "skyrl.log").open("w") as log:
        process = subprocess.Popen(
            [environment.absolute() / "bin" / "python", "-m", "benchmarks.skyrl_run", path],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=600.0 + 60.0 * steps)
        finally:
            end(process.pid)  # and the server that it has started
    if process.returncode:
        raise SystemExit(f"SkyRL ended with code {process.returncode}: {(folder / 'skyrl.log').read_text()[-2000:]}")
    run = json.loads(output.splitlines()[-1])
    return [after - before for before, after in zip(run["seconds"], run["seconds"][1:], strict=False)], run["rewards"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "skyrl", help="of SkyRL")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", type=int, default=2, help="titan_rl: steps that weights may be old")
    arguments = parser.parse_args()
    base = make_base("short")
    ratios: list[float] = []
    compiled: list[float] = []
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            theirs, rewards = run_skyrl(arguments.environment, base, seed, arguments.steps, Path(folder))
            ours = run_ours(base, "short", seed, arguments.steps, arguments.staleness, Path(folder)).seconds_a_step
        part = max(1, len(rewards) // 4)
        print(
            f"seed {seed}: SkyRL {fmean(theirs):.2f} s a step, median {median(theirs):.2f}, reward"
            f" {fmean(rewards[:part]):.3f} to {fmean(rewards[-part:]):.3f}; titan_rl {ours:.2f} s",
            flush=True,
        )
        ratios.append(fmean(theirs) / ours)
        compiled.append(median(theirs) / ours)
    for name, values in (("speedup_skyrl", ratios), ("speedup_skyrl_compiled", compiled)):
        tell(name, median(values), None, f"ratio, {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
