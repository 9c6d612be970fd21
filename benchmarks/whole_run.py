"""Time of a whole run, compared with the work that it does.

    python -m benchmarks.whole_run [--config examples/alphabet_sort/cpu.toml] [--steps 16] [--first 5]

The work of a step is the processor time of the engines' steps and of forward, backward and optimizer for the same
tokens, each measured bare, in a process with nothing else: vLLM's core is given the prompts of one step of the run and
samples as many tokens for each as the run did, and torchtitan's model trains on the same conversations, packed alike.
`whole_run_vs_work` is this work divided by the run's wall time times the cores, so that 1 would be a run that does
nothing else and never waits. Steps before `--first` do not count.

Prints one JSON object per line, then the waterfall: where the other core seconds of a step go.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.paired import Spread, report
from benchmarks.processes import CpuUse, cpu_use, load, titan_rl
from titan_rl.run.directory import read_jsonl

SUBJECT = ("titan_rl",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps of a run.

    Attributes:
        step_s: Wall time of each.
        cpu_s: Processor time of a step by process, the mean.
        rollouts: Trained rollouts of one step, as `rollouts.jsonl` has them.
    """

    step_s: Sequence[float]
    cpu_s: Mapping[str, float]
    rollouts: Sequence[Mapping[str, Any]]


def run(config: str, steps: int, first: int, folder: Path, options: Sequence[str]) -> Measured:
    """Train, and measure from the end of step `first - 1` to that of the last."""
    given = {
        "training.steps": str(steps),
        "run_dir": str(folder),
        "validation.num_prompts": "0",
        "logging.transcripts_per_step": "1000",
    }
    settings = [f"--{name}={value}" for name, value in given.items()]
    process = titan_rl("train", config, *settings, *options, log=folder / "output.log")
    ends: list[tuple[float, CpuUse]] = []
    while process.poll() is None:
        time.sleep(0.01)
        metrics = next(iter(folder.glob("[0-9]*/metrics.jsonl")), None)
        num_done = 0 if metrics is None else sum("train/loss" in line for line in metrics.read_text().splitlines())
        if num_done > len(ends):
            ends += [(time.monotonic(), cpu_use(process.pid))] * (num_done - len(ends))
    if process.returncode:
        sys.exit((folder / "output.log").read_text())
    (_, before), *_, (_, after) = measured = ends[first - 2 :]
    moments = [moment for moment, _ in measured]
    step_s = [end - begin for begin, end in pairwise(moments)]
    cpu_s = {name: seconds / len(step_s) for name, seconds in after.since(before).items()}
    rollouts = [
        line
        for path in folder.glob("[0-9]*/rollouts.jsonl")
        for line in read_jsonl(path)
        if line["phase"] == "train" and line["step"] == steps - 1
    ]
    return Measured(step_s, cpu_s, rollouts)


def turns(rollout: Mapping[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and completion of each turn of a rollout, as token ids."""
    context: list[int] = []
    for turn in rollout["turns"]:
        tokens = turn["tokens"]
        prompt = [*context[: tokens["shared"]], *tokens["prompt"]["ids"]]
        completion = list(tokens["completion"]["ids"])
        yield prompt, completion
        context = [*prompt, *completion]


def bare_engine_s(rollouts: Sequence[Mapping[str, Any]], config: str, rounds: int) -> float:
    """Processor time of vLLM's core for the turns of a step, of which those of one place run at the same time."""
    from titan_rl.config.concurrency import max_running_of
    from titan_rl.config.load import load_config
    from titan_rl.generation.engine import EngineSpec
    from titan_rl.generation.request import EngineRequest
    from titan_rl.generation.vllm_engine import VLLMEngine
    from titan_rl.types import SamplingParams

    settings = load_config(config)
    model, generation = settings.model, settings.generation
    engine = VLLMEngine(
        EngineSpec(
            model.path,
            dtype=model.dtype,
            max_context=model.max_context,
            max_running=max_running_of(model, generation, len(rollouts)),
            kv_cache_gib=generation.kv_cache_gib,
        )
    )
    by_place: dict[int, list[tuple[list[int], list[int]]]] = {}
    for rollout in rollouts:
        for place, turn in enumerate(turns(rollout)):
            by_place.setdefault(place, []).append(turn)
    taken: list[float] = []
    for number in range(rounds + 1):
        began = time.process_time()
        for place, asked in by_place.items():
            left = len(asked)
            for index, (prompt, completion) in enumerate(asked):
                count = len(completion)
                sampling = SamplingParams(max_tokens=count, min_tokens=count, temperature=1.0)
                engine.add(EngineRequest(f"{number}-{place}-{index}", prompt, sampling))
            while left:
                left -= sum(delta.finish_reason is not None for delta in engine.step())
        taken.append(time.process_time() - began)
        engine.reset_prefix_cache()  # a run loads weights, and reads nothing that older ones have computed
    engine.close()
    return median(taken[1:])


def bare_trainer_s(rollouts: Sequence[Mapping[str, Any]], config: str, rounds: int) -> float:
    """Processor time of forward, backward and optimizer for the rollouts of a step, packed as the run packs them."""
    from benchmarks.trainer import BareLoop
    from titan_rl.config.load import load_config
    from titan_rl.training.data.sample import TrainingSample

    settings = load_config(config)
    samples: list[TrainingSample] = []
    for rollout in rollouts:
        ids, mask = list[int](), list[bool]()
        for prompt, completion in turns(rollout):
            mask += [False] * (len(prompt) - len(mask)) + [True] * len(completion)
            ids = [*prompt, *completion]
        values = [-0.5 if trained else 0.0 for trained in mask]
        versions = [0 if trained else -1 for trained in mask]
        samples.append(
            TrainingSample(rollout["group_id"], rollout["rollout_id"], ids, mask, values, values, versions, 1.0)
        )
    bare = BareLoop(settings.model, settings.training, samples)
    bare.step()
    taken: list[float] = []
    for _ in range(rounds):
        began = time.process_time()
        bare.step()
        taken.append(time.process_time() - began)
    return median(taken)


def in_own_process(part: str, rollouts: Path, config: str, rounds: int) -> float:
    """Measure a part in a process that does nothing else."""
    import subprocess

    command = [sys.executable, "-m", "benchmarks.whole_run", "--bare", part, "--rollouts", str(rollouts)]
    done = subprocess.run(
        [*command, "--config", config, "--rounds", str(rounds)], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def waterfall(measured: Measured, engine_s: float, trainer_s: float) -> Iterator[tuple[str, float]]:
    """Core seconds of a step, from the work to all that the machine has."""
    engines = sum(seconds for name, seconds in measured.cpu_s.items() if name.startswith("generator"))
    trainer = sum(seconds for name, seconds in measured.cpu_s.items() if name.startswith("trainer"))
    others = sum(measured.cpu_s.values()) - engines - trainer - measured.cpu_s.get("controller", 0.0)
    available = CORES * sum(measured.step_s) / len(measured.step_s)
    yield "engine steps, bare", engine_s
    yield "forward, backward and optimizer, bare", trainer_s
    yield "generators: smaller batches, requests, pulls, checks", engines - engine_s
    yield "trainer: loss, packing, publishing, contention", trainer - trainer_s
    yield "controller: environments, renderer, scheduling, journal, logs", measured.cpu_s.get("controller", 0.0)
    yield "other processes", others
    yield "idle, or used by other programs", available - sum(measured.cpu_s.values())
    yield "all cores", available


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/alphabet_sort/cpu.toml")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--first", type=int, default=5, help="first step that counts")
    parser.add_argument("--rounds", type=int, default=3, help="of the bare measurements")
    parser.add_argument("--bare", choices=["engine", "trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--rollouts", type=Path, help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    if arguments.bare is not None:
        measure = bare_engine_s if arguments.bare == "engine" else bare_trainer_s
        print(measure(json.loads(arguments.rollouts.read_text()), arguments.config, arguments.rounds))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured = run(arguments.config, arguments.steps, arguments.first, folder, options)
        rollouts = folder / "rollouts.json"
        rollouts.write_text(json.dumps(measured.rollouts))
        engine_s, trainer_s = (
            in_own_process(part, rollouts, arguments.config, arguments.rounds) for part in ("engine", "trainer")
        )
    work = engine_s + trainer_s
    report("whole_run_vs_work", Spread([work / (CORES * each) for each in measured.step_s]), "ratio", 0.8)
    report("whole_run_step_s", Spread(measured.step_s), "s")
    report("whole_run_cpu_vs_work", work / sum(measured.cpu_s.values()), "ratio")
    print(load(), file=sys.stderr)
    parts = list(waterfall(measured, engine_s, trainer_s))
    for part, seconds in parts:
        print(f"{part:64} {seconds:7.3f} s {'#' * round(40 * seconds / parts[-1][1])}")


if __name__ == "__main__":
    main()
