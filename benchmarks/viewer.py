"""Response times and memory of `titan-rl view` with a large run.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}. Targets are upper limits, and
null for figures without a target. `synthetic_run.py` and `synthetic_trace.py` generate the run. The server is a process
of its own, queried over HTTP.

    python benchmarks/viewer.py [--steps 10000] [--rollouts 100000] [--tokens 100] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
from synthetic_run import BEGAN, STEP_S, TASKS, write_run
from synthetic_trace import write_traces

SUBJECT = ("titan_rl/viewer",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

PAGE_S, FILTER_S, TIMELINE_S, MEMORY_MB = 2.0, 0.2, 2.0, 500.0
NUM_FILTERS = 60
WAIT_S = 60.0


def report(name: str, value: float, unit: str, target: float | None = None) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "target": target, "unit": unit}), flush=True)


@contextlib.contextmanager
def server(folder: Path) -> Generator[tuple[int, httpx.Client]]:
    """Start the server, and yield its process id and an authorized client."""
    command = [sys.executable, "-m", "titan_rl.cli.main", "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url, key = re.findall(r"(http://\S+)/\?key=(\S+)", process.stdout.readline())[0]
            with httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client:
                client.get("/", params={"key": key})
                yield process.pid, client
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)


def seconds_of(client: httpx.Client, path: str, **parameters: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = client.get(path, params=parameters).raise_for_status()
    seconds = time.perf_counter() - began
    return seconds, answer.json()


def open_page(client: httpx.Client, run: str) -> None:
    """Make the requests of a page when it opens, one after the other."""
    total = 0.0
    _, listed = seconds_of(client, f"/api/runs/{run}/metrics")
    names = [metric["name"] for metric in listed["metrics"]]
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "summary": ("summary", {}),
        "metrics": ("metrics", {}),
        "curves": ("curves", {"names": ",".join(names), "points": 1000}),
        "rollouts": ("rollouts", {}),
        "rollout": ("rollouts/7", {}),
    }
    for what, (path, parameters) in asked.items():
        seconds, _ = seconds_of(client, f"/api/runs/{run}/{path}", **parameters)
        report(f"viewer_first_{what}", seconds, "s")
        total += seconds
    report("viewer_page", total, "s", PAGE_S)


def wait_for_index(client: httpx.Client, run: str) -> None:
    began = time.perf_counter()
    while True:
        _, answer = seconds_of(client, f"/api/runs/{run}/rollouts", limit=1)
        if answer["indexed"] >= 1:
            break
    report("viewer_index", time.perf_counter() - began, "s")
    report("viewer_rollouts", answer["total"], "rollouts")


def filters(client: httpx.Client, run: str, steps: int) -> None:
    """Typical filters of a user, all different."""
    chance = random.Random(0)
    seconds: list[float] = []
    for number in range(NUM_FILTERS):
        first = chance.randrange(steps)
        kinds: list[dict[str, Any]] = [
            {"status": chance.choice(["completed", "error_env"]), "task": chance.choice(TASKS)},
            {"step_min": first, "step_max": first + 50, "sort": "reward", "descending": "true"},
            {"reward_min": chance.random(), "phase": "train", "offset": 1000},
            {"text": chance.choice(["Anna", "dictionary", "nobody", "Bo, D"])},
            {"group": f"g{first}", "dropped": "false"},
            {"sort": "num_completion_tokens", "descending": "true"},
        ]
        seconds.append(seconds_of(client, f"/api/runs/{run}/rollouts", **kinds[number % len(kinds)])[0])
    report("viewer_filter", statistics.median(seconds), "s")
    report("viewer_filter_p95", statistics.quantiles(seconds, n=20)[-1], "s", FILTER_S)


def timelines(client: httpx.Client, run: str, step_s: float = STEP_S) -> None:
    """Requests for the whole run, some steps in its middle, and its last ones, which have all of their rollouts."""
    path = f"/api/runs/{run}/timeline"
    seconds, whole = seconds_of(client, path, width=1500)
    report("viewer_first_timeline", seconds, "s", TIMELINE_S)
    report("viewer_next_timeline", seconds_of(client, path, width=1500)[0], "s", FILTER_S)
    for what, until in {"middle": whole["to"] / 2, "end": whole["to"]}.items():
        for steps in 10, 1000:
            asked = {"from": max(0.0, until - steps * step_s), "to": until, "width": 3000}
            seconds, answer = seconds_of(client, path, **asked)
            report(f"viewer_timeline_{what}_{steps}", seconds, "s")
            report(f"viewer_spans_{what}_{steps}", sum(len(lane["spans"]) for lane in answer["lanes"]), "spans")


def peak_mb(pid: int) -> float:
    return float(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=100, help="of a completion, about")
    parser.add_argument("--folder", type=Path, help="to make the run in, or where it is already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch) / "run"
        if not (folder / "metrics.jsonl").exists():
            write_run(folder, steps=arguments.steps, rollouts=arguments.rollouts, tokens=arguments.tokens)
            write_traces(folder / "trace", BEGAN, steps=arguments.steps, rollouts=arguments.rollouts, step_s=STEP_S)
        size = sum(os.path.getsize(folder / name) for name in ("metrics.jsonl", "rollouts.jsonl"))
        report("viewer_run_size", size / 1e6, "MB")
        report("viewer_trace_size", sum(path.stat().st_size for path in folder.glob("trace/*")) / 1e6, "MB")
        with server(folder) as (pid, client):
            open_page(client, folder.name)
            wait_for_index(client, folder.name)
            filters(client, folder.name, arguments.steps)
            timelines(client, folder.name)
            report("viewer_peak_memory", peak_mb(pid), "MB", MEMORY_MB)


if __name__ == "__main__":
    main()
