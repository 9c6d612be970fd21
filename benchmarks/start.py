"""Time from `titan-rl train` to the first sampled token, and from the last save to the shell prompt.

    python -m benchmarks.start [--config examples/alphabet_sort/cpu.toml] [--rounds 3]

`start_vs_bare_engine` compares the first token of a run, with its generators and its trainer, with the first token of a
bare `LLM(...)` of the same model, prompt and engine options in its own process. Rounds take turns in both
directions. `end_s` is the time from the last checkpoint to the end of the command. Both are also given in processor
seconds of all processes, which other programs on the machine change less. The phases of a start are from the run's
trace: until the trainer's process runs, until each process has its model, and until the first token.
`command_s_help` and the others are wall times of commands that start no engine, and `command_cpu_s_help` their
processor time.

Prints one JSON object per line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.paired import Spread, forth_and_back, ratio, report
from benchmarks.processes import load, titan_rl
from titan_rl.config.load import load_config

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

BARE = """
import sys, time
from titan_rl.generation.vllm_arguments import ENVIRONMENT
import os
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
from vllm import LLM, SamplingParams
path, max_context, kv_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(path, max_model_len=max_context, dtype="float32", kv_cache_memory_bytes=kv_bytes, enforce_eager=True,
          skip_tokenizer_init=True)
llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
"""


@dataclass(slots=True)
class Starts:
    """Starts of runs and of bare engines, and what else was measured of the runs."""

    config: str
    folder: Path
    end_s: list[float] = field(default_factory=list[float])
    cpu_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    phases: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])

    async def run(self) -> float:
        """Seconds from the command to the first token of a run of one step."""
        folder = self.folder / f"run-{len(self.end_s)}"
        folder.mkdir()
        began, before = time.time(), _children_s()
        settings = {"run_dir": str(folder), "training.steps": "1", "validation.num_prompts": "0"}
        given = [f"--{name}={value}" for name, value in settings.items()]
        process = titan_rl("train", self.config, *given, log=folder / "output.log")
        if process.wait():
            sys.exit((folder / "output.log").read_text())
        ended = time.time()
        self.cpu_s.setdefault("run", []).append(_children_s() - before)
        (saved,) = folder.glob("[0-9]*/checkpoints/*")
        self.end_s.append(ended - saved.stat().st_mtime)
        (trace,) = folder.glob("[0-9]*/trace")
        moments = _moments(trace)
        self.phases.append({name: moment - began for name, moment in moments.items()})
        return moments["first token"] - began

    async def bare(self) -> float:
        """Seconds from the start of Python to the first token of vLLM's `LLM`, its end excluded."""
        config = load_config(self.config)
        kv_bytes = int((config.generation.kv_cache_gib or 1) * 2**30)
        command = [sys.executable, "-c", f"{BARE}\nprint(time.time(), flush=True); os._exit(0)", config.model.path]
        command += [str(config.model.max_context), str(kv_bytes)]
        began, before = time.time(), _children_s()
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await process.communicate()
        if process.returncode:
            sys.exit(f"the bare engine ended with code {process.returncode}")
        self.cpu_s.setdefault("bare", []).append(_children_s() - before)
        return float(output.splitlines()[-1]) - began


COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "train_help": ["train", "--help"],
    "doctor": ["doctor"],
    "dry_run": ["train", "CONFIG", "--dry-run"],
}
TARGETS_S = {"help": 0.15, "version": 0.15, "train_help": 0.15, "doctor": 3.0, "dry_run": 1.0}


def measure_commands(config: str, log: Path, rounds: int) -> None:
    """Print the wall and processor time of commands that start no engine."""
    for name, words in COMMANDS.items():
        given = [config if word == "CONFIG" else word for word in words]
        wall_s: list[float] = []
        cpu_s: list[float] = []
        for _ in range(rounds + 1):
            began, before = time.monotonic(), _children_s()
            titan_rl(*given, log=log).wait()
            wall_s.append(time.monotonic() - began)
            cpu_s.append(_children_s() - before)
        report(f"command_s_{name}", Spread(wall_s[1:]), "s", TARGETS_S[name])
        report(f"command_cpu_s_{name}", Spread(cpu_s[1:]), "processor s")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _moments(trace: Path) -> dict[str, float]:
    """Ends of the phases of a start, in seconds of the clock."""
    spans = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in trace.glob("*.jsonl")}
    generating = [
        span["ts"] + span["dur"] / max(1, span["args"].get("steps", 1))
        for name, own in spans.items()
        if name.startswith("generator")
        for span in own
        if span.get("name") == "generating"
    ]
    loaded = [_first(own, "ts", name="idle") for name, own in spans.items() if name.startswith("generator")]
    return {
        "trainer runs": _first(spans["trainer"], "ts") / 1e6,
        "trainer has its model": _first(spans["trainer"], "end", name="load") / 1e6,
        "generators have theirs": max(loaded) / 1e6,
        "first token": min(generating) / 1e6,
    }


def _first(spans: list[dict[str, Any]], moment: str, name: str | None = None) -> float:
    """Begin (`ts`) or end of the first span, or of the first of a name."""
    found = [span for span in spans if span.get("ph") == "X" and name in (None, span["name"])]
    return min(span["ts"] + (span["dur"] if moment == "end" else 0) for span in found)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/alphabet_sort/cpu.toml")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_commands(arguments.config, Path(folder) / "command.log", arguments.rounds)
        starts = Starts(arguments.config, Path(folder))
        measured = await forth_and_back(arguments.rounds, {"run": starts.run, "bare": starts.bare})
    report("start_vs_bare_engine", ratio(measured, "run", "bare"), "ratio", 1.1)
    report("start_s", Spread([each["run"] for each in measured]), "s")
    report("bare_engine_s", Spread([each["bare"] for each in measured]), "s")
    report("end_s", Spread(starts.end_s[1:]), "s", 2.0)
    report("run_of_one_step_cpu_s", Spread(starts.cpu_s["run"][1:]), "processor s")
    report("bare_engine_cpu_s", Spread(starts.cpu_s["bare"][1:]), "processor s")
    for name in starts.phases[0]:
        report(f"until_{name.replace(' ', '_')}_s", median(each[name] for each in starts.phases[1:]), "s")
    print(load(), file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
