"""Several experiments at once, each with an adapter, against one after the other.

    python -m benchmarks.tenants [--only simulated real] [--experiments 32] [--steps 10] [--tool_s 0 2]

- tenants_utilization: seconds of the experiments one after the other, over those of all at once, in virtual time; the
  work is the same, so this is the ratio of utilizations. Router, rollouter, scheduler and fair turns are the real ones;
  engines and trainer are simulated. Assumptions: 2 engines whose step takes 20 ms with one request and 40 ms with 128;
  answers of 200 tokens in the median, with a tail to 2,000; 8 groups of 8 in a step; a step of the trainer takes 1 s;
  loading an adapter takes 10 ms.
- tenants_fairness: largest time of the trainer of an experiment over the smallest while all of them train.
- tenants_speedup: seconds of four runs of `examples/alphabet_sort` with different ranks, algorithms and learning rates,
  one after the other, over those of one run of all four with [[adapters]], start and export included.
- tenants_speedup_tool_N_s: the same if the environment of every turn takes N seconds in the median, as tools, sandboxes
  and judges do, during which a run alone leaves the machine idle.
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
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import NonNegativeFloat

from benchmarks.simulated_replica import SimulatedReplica, some_tokens
from benchmarks.simulation import FOREVER_S, UNLIMITED, Workload, log_normal_with_tail
from examples.alphabet_sort.data import Sample
from examples.alphabet_sort.env import AlphabetSortEnv
from examples.alphabet_sort.task import AlphabetSort
from titan_rl import Message, MessageStep
from titan_rl.generation.request import EngineRequest, OnChunk
from titan_rl.generation.router import GeneratorRouter, Limits
from titan_rl.generation.scripted_engine import CostModel
from titan_rl.generation.types import PauseMode
from titan_rl.rollout.environment.messages import MessageTokenEnv
from titan_rl.rollout.environment.types import TokenEnv, TokenObservation, TokenStep
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.renderer.types import Renderer
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.types import Completion, SamplingParams, TokenChunk, VersionSpan

COST = CostModel(step=0.02, request=0.02 / 128, prompt_token=1e-5)
NUM_ENGINES, MAX_RUNNING, TRAIN_S, PUBLISH_S, LOAD_S = 2, 256, 1.0, 0.02, 0.01
DRAW = log_normal_with_tail(median=200, sigma=0.6, cap=2000)
LIMITS = Limits(pull_s=FOREVER_S, abort_s=FOREVER_S, call_s=FOREVER_S, paused_s=FOREVER_S)


class Env:
    """Environment of one prompt and one answer."""

    async def reset(self) -> TokenObservation:
        return TokenObservation(some_tokens(256))

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


class AdapterView:
    """A simulated engine for the router of one adapter. A completion has the version it began with."""

    def __init__(self, shared: SimulatedReplica, adapter: str) -> None:
        self.name = shared.name
        self._shared, self._adapter, self._version = shared, adapter, 0

    async def stream(self, request: EngineRequest, on_chunk: OnChunk) -> Completion:
        version = self._version

        def marked(chunk: TokenChunk) -> None:
            spans = (VersionSpan(version, len(chunk.token_ids)),) if chunk.token_ids else ()
            on_chunk(replace(chunk, request_id=request.request_id, version_spans=spans))

        sent = replace(request, request_id=f"{self._adapter}:{request.request_id}")
        answer = await self._shared.stream(sent, marked)
        return replace(
            answer, request_id=request.request_id, version_spans=(VersionSpan(version, len(answer.token_ids)),)
        )

    async def pull(self, version: int) -> int:
        await asyncio.sleep(LOAD_S)
        self._version = version
        return version

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._shared.abort([f"{self._adapter}:{request_id}" for request_id in request_ids])

    async def close(self) -> None: ...


class Experiment:
    """One experiment on shared engines and a shared trainer."""

    def __init__(self, name: str, engines: Sequence[SimulatedReplica], turns: FairTurns) -> None:
        self.name = name
        self._turns = turns
        self._workload = Workload(DRAW, 8, seed=int(name))
        self._router = GeneratorRouter(
            [AdapterView(engine, name) for engine in engines], stall_timeout_s=FOREVER_S, limits=LIMITS
        )
        self._rollouter = Rollouter(
            lambda sample: Env(),
            Rubric([Reward(_first_sibling, name="first")]),
            max_context=1 << 30,
            limits=RolloutConfig(rollout_timeout_s=FOREVER_S, generate_timeout_s=FOREVER_S),
            seed=None,
        )

    def length(self, request_id: str, context: int) -> int:
        index, sibling, _ = request_id.split("/")
        return self._workload.length(int(index), int(sibling)) + 256 - context

    async def run(self, steps: int) -> None:
        settings = SchedulingConfig(groups_per_step=8)
        scheduler = GroupScheduler(self._run_group, settings, group_size=8, budget=8 * steps)
        await self._router.pull_state_dict(0)
        async with asyncio.TaskGroup() as background, scheduler:
            for version in range(1, steps + 1):
                batch = await scheduler.next_batch()
                async with self._turns.turn(self.name):
                    await asyncio.sleep(TRAIN_S)
                batch.trained(version)
                async with self._turns.turn(self.name, urgent=True):
                    await asyncio.sleep(PUBLISH_S)
                await self._router.pull_state_dict(version)
                batch.release()
            del background
        await self._router.close()

    async def _run_group(self, lease: Lease) -> RolloutGroup:
        return await self._rollouter.run_group(
            self._router.generate,
            None,
            group_id=str(lease.index),
            group_size=8,
            sampling=SamplingParams(max_tokens=1 << 20),
            on_finished=lease.rollout_finished,
        )


def _first_sibling(rollout: Rollout) -> float:
    return float(rollout.sibling == 0)


def simulate(names: Sequence[str], steps: int) -> tuple[float, float]:
    """Virtual seconds of experiments at once, and the largest over the smallest time of the trainer once the first has
    finished."""
    import looptime

    loop = looptime.new_event_loop()
    experiments: dict[str, Experiment] = {}

    def length(request_id: str, context: int) -> int:
        name, _, rest = request_id.partition(":")
        return experiments[name].length(rest, context)

    async def main() -> tuple[float, float]:
        engines = [
            SimulatedReplica(f"generator-{index}", length, COST, max_running=MAX_RUNNING, kv_tokens=UNLIMITED)
            for index in range(NUM_ENGINES)
        ]
        turns, ratio = FairTurns(names), list[float]()
        experiments.update((name, Experiment(name, engines, turns)) for name in names)

        async def run(experiment: Experiment) -> None:
            await experiment.run(steps)
            if not ratio:
                used = [turns.used_s(name) for name in names]
                ratio.append(max(used) / min(used))

        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(engine.run()) for engine in engines]
            await asyncio.gather(*(run(experiment) for experiment in experiments.values()))
            for task in serving:
                task.cancel()
        return asyncio.get_running_loop().time(), ratio[0]

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def figure(name: str, value: float, target: float, unit: str) -> None:
    print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit}), flush=True)


def simulated(num_experiments: int, steps: int) -> None:
    names = [str(number) for number in range(num_experiments)]
    alone = sum(simulate([name], steps)[0] for name in names)
    together, fairness = simulate(names, steps)
    print(f"one after the other {alone:.0f} s, at once {together:.0f} s, in virtual time")
    figure("tenants_utilization", alone / together, 4.3, "seconds one after the other over those at once, at least")
    figure("tenants_fairness", fairness, 1.1, "largest time of the trainer over the smallest, at most")


class SlowNames(AlphabetSort):
    """Alphabet-sort with a tool that takes its time in every turn."""

    tool_s: NonNegativeFloat = 0.0
    """Median time of the tool, which is log-normal."""

    def make_env(self, sample: Sample, renderer: Renderer) -> TokenEnv:
        return MessageTokenEnv(SlowEnv(sample, self.tool_s), renderer)


class SlowEnv(AlphabetSortEnv):
    def __init__(self, sample: Sample, tool_s: float) -> None:
        super().__init__(sample)
        self._tool_s = tool_s

    async def step(self, message: Message) -> MessageStep:
        await asyncio.sleep(self._tool_s * random.lognormvariate(0, 0.5))
        return await super().step(message)


TABLES = """
[[tasks]]
name = "names"
type = "benchmarks.tenants:SlowNames"
tool_s = {tool_s}
pool_size = 24
min_turns = 2
max_first_names = 3
max_new_names = 2
"""
EXPERIMENTS = {
    "grpo": {"adapter.rank": "1"},
    "gspo": {"adapter.rank": "4", "algorithm": '"gspo"', "lr": "1e-3"},
    "cispo": {"adapter.rank": "8", "algorithm": '"cispo"', "lr": "2e-3"},
    "rloo": {"adapter.rank": "2", "algorithm": '"rloo"', "lr": "1e-3"},
}


def real(steps: int, tool_s: float) -> None:
    base = Path("examples/alphabet_sort/lora.toml")
    with tempfile.TemporaryDirectory() as place:
        folder, common = Path(place), base.read_text().partition("[task]")[0].replace("adapter.rank = 1", "")
        common = common.replace('path = "base"', f'path = "{(base.parent / "base").resolve()}"')
        alone = 0.0
        tables = TABLES.format(tool_s=tool_s)
        several = common + tables
        for name, settings in EXPERIMENTS.items():
            several += f'\n[[adapters]]\nname = "{name}"\ntasks = ["names"]\n'
            several += "".join(f"training.{key} = {value}\n" for key, value in settings.items())
            (file := folder / f"{name}.toml").write_text(common + tables)
            options = [f"--training.{key}={value.strip(chr(34))}" for key, value in settings.items()]
            alone += train(file, folder / "runs", steps, options)
        (file := folder / "several.toml").write_text(several)
        together = train(file, folder / "runs", steps, [])
    print(f"one after the other {alone:.1f} s, at once {together:.1f} s, with tools of {tool_s:g} s")
    name = f"tenants_speedup_tool_{tool_s:g}_s" if tool_s else "tenants_speedup"
    figure(name, alone / together, 2.8, "seconds one after the other over those at once, at least")


def train(file: Path, runs: Path, steps: int, options: Sequence[str]) -> float:
    """Seconds of a run."""
    common = [f"--run_dir={runs}", f"--training.steps={steps}", "--validation.num_prompts=16", "--quiet"]
    began = time.monotonic()
    command = [sys.executable, "-m", "titan_rl.cli.main", "train", str(file), *common, *options]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("simulated", "real"), default=("simulated", "real"))
    parser.add_argument("--experiments", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tool_s", type=float, nargs="+", default=[0.0, 2.0], help="for each, the real runs once")
    arguments = parser.parse_args()
    if "simulated" in arguments.only:
        simulated(arguments.experiments, arguments.steps)
    if "real" in arguments.only:
        for tool_s in arguments.tool_s:
            real(arguments.steps, tool_s)


if __name__ == "__main__":
    main()
