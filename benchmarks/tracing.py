"""Cost of recording a trace.

    python -m benchmarks.tracing [--rounds 40] [--runs 3]

The first figure is processor time, the minimum over the rounds: rollouts of one turn whose replicas answer at once, as
in `benchmarks.controller`, with and without a recorder and the writing of its file. There is no model, so that nothing
hides the cost.

With `--runs` the example is run in pairs, with and without a trace, in both directions: the ratio of its times per
step.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.controller import GROUPS, SIBLINGS, OneAnswer, Replica, prompts
from benchmarks.paired import Spread, report
from titan_rl import Reward, Rollouter, Rubric, SamplingParams
from titan_rl.cluster.processes.garbage_collection import settled_heap
from titan_rl.config.load import load_config
from titan_rl.core.console import LOG
from titan_rl.core.tracing import spans
from titan_rl.generation.router import GeneratorRouter
from titan_rl.run.directory import read_jsonl
from titan_rl.run.train import run_training

SUBJECT = ("titan_rl/core/tracing",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

EXAMPLE = Path(__file__).parents[1] / "examples" / "alphabet_sort" / "cpu.toml"
MOST_BYTES = 32 << 20
TARGET = 1.01


async def per_rollout(rounds: int, folder: Path) -> None:
    replicas = [Replica(str(index)) for index in range(2)]
    router = GeneratorRouter(replicas)
    rubric = Rubric([Reward(lambda rollout: 1.0, name="one")])
    rollouter = Rollouter(OneAnswer, rubric, max_context=512, finish_session=router.finish_session)
    sampling = SamplingParams(max_tokens=64, min_tokens=64)

    async def step() -> None:
        groups = [
            rollouter.run_group(router.generate, prompt, group_id=f"g{group}", group_size=SIBLINGS, sampling=sampling)
            for group, prompt in enumerate(prompts())
        ]
        await asyncio.gather(*groups)

    async def without() -> float:
        began = time.process_time()
        await step()
        return time.process_time() - began

    async def recorded() -> float:
        with spans.recording(folder, "controller", MOST_BYTES, LOG):
            began = time.process_time()
            await step()
            spans.flush()
            return time.process_time() - began

    least = {"without": float("inf"), "recorded": float("inf")}
    await step()
    with settled_heap():
        for _ in range(rounds):
            least["without"] = min(least["without"], await without())
            least["recorded"] = min(least["recorded"], await recorded())
    await router.close()
    more = (least["recorded"] - least["without"]) / (GROUPS * SIBLINGS) * 1e6
    report("tracing_cpu_us_per_rollout", more, "us")
    report("rollout_cpu_us_without", least["without"] / (GROUPS * SIBLINGS) * 1e6, "us")


def seconds_of_a_step(folder: Path, *, trace: bool) -> float:
    trace_it = ("logging.trace", "true" if trace else "false")
    overrides = [("run_dir", str(folder)), trace_it, ("training.steps", "12"), ("validation.num_prompts", "0")]
    end = run_training(load_config(EXAMPLE, overrides))
    steps = [record["time/step_s"] for record in read_jsonl(end.run_dir / "metrics.jsonl") if "time/step_s" in record]
    return median(steps[2:])


def of_runs(pairs: int, folder: Path) -> None:
    ratios: list[float] = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {trace: seconds_of_a_step(folder, trace=trace) for trace in order}
        ratios.append(times[True] / times[False])
    report("step_with_trace_vs_without", Spread(ratios), "x, at most", TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--runs", type=int, default=0, help="pairs of runs of the example")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(per_rollout(arguments.rounds, Path(folder)))
        if arguments.runs:
            of_runs(arguments.runs, Path(folder))


if __name__ == "__main__":
    main()
