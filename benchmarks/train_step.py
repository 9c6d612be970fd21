"""Breakdown of the trainer thread's time in a step of `make train`, compared with the same step on torchtitan alone.

    python -m benchmarks.train_step [--rounds 7] [--profile]

There are 128 conversations like those of alphabet-sort, 16 prompts with 8 siblings each, and the example's model of
0.9M parameters. A bare step is forward, cross-entropy, backward and AdamW of torchtitan's model on the same packed
rows, laid out in advance. It is compared with the work of the trainer's thread between two batches: `TrainerCore.step`
and `WeightPublisher.publish`. Times are processor times of that thread, with one thread for torch. Ratios are medians
of rounds, in which each takes a turn.

Prints one JSON object per line: `train_step_vs_bare`, `publish_vs_bare`, and the milliseconds of each part. With
`--profile` also the time of torch's operators.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.generation import make_model
from benchmarks.paired import Spread, report
from benchmarks.trainer import BareLoop
from titan_rl.training import gradient_pass, trainer
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.publishing import WeightPublisher
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.weights.transports.shared_memory import SharedMemoryTransport

GROUPS, SIBLINGS, PROMPT, TURN = 16, 8, 24, 12


def conversations() -> list[TrainingSample]:
    """Conversations of one to three turns after a prompt that siblings share: about 60 tokens, half of them trained."""
    rng = random.Random(0)
    samples: list[TrainingSample] = []
    for group in range(GROUPS):
        prompt = [rng.randrange(550) for _ in range(PROMPT)]
        turns = rng.randint(1, 3)
        for sibling in range(SIBLINGS):
            tokens, mask = list(prompt), [False] * PROMPT
            for turn in range(turns):
                observed = rng.randint(TURN // 2, TURN) if turn else 0
                drawn = rng.randint(TURN // 2, 2 * TURN)
                tokens += [rng.randrange(550) for _ in range(observed + drawn)]
                mask += [False] * observed + [True] * drawn
            logprobs = [-6.3 if trained else 0.0 for trained in mask]
            advantages = [rng.uniform(-1, 1) if trained else 0.0 for trained in mask]
            versions = [0 if trained else -1 for trained in mask]
            samples.append(
                TrainingSample(f"g{group}", f"g{group}/{sibling}", tokens, mask, logprobs, advantages, versions, 1.0)
            )
    return samples


def seconds(function: Callable[[], object]) -> float:
    """Processor time of this thread."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


class Parts:
    """Seconds that a step or a publish spends in each part, without the parts that it calls.

    `measured` wraps the calls to measure, because the bare step shares functions with them.
    """

    def __init__(self, core: TrainerCore) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._is_on = False
        policy, passes, optimizers = core._policy, core._gradient_pass, core._optimizers
        self._time(trainer, "plan_step", "packing")
        self._time(core, "_minibatches", "tensors and layout")
        self._time(policy, "logprobs", "forward")
        self._time(type(passes._objective), "__call__", "objective")
        self._time(torch.Tensor, "backward", "backward")
        self._time(gradient_pass, "average_and_clip", "clipping")
        self._time(optimizers, "step", "optimizer")
        self._time(optimizers, "zero_grad", "optimizer")
        self._time(trainer, "token_metrics", "metrics")
        self._time(core, "score_published", "probes of a version")

    def measured(self, function: Callable[[], object]) -> float:
        self._is_on = True
        try:
            return seconds(function)
        finally:
            self._is_on = False

    def _time(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return function(*args, **kwargs)
            before, began = sum(self.seconds.values()), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                within = sum(self.seconds.values()) - before
                self.seconds[part] += time.thread_time() - began - within

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also print what torch's operators take")
    arguments = parser.parse_args()
    samples = conversations()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        model, training = (
            ModelConfig(path=folder, max_context=256),
            TrainingConfig(steps=10_000, lr=1e-6, row_tokens=4096),
        )
        core, bare = TrainerCore(model, training, seed=0), BareLoop(model, training, samples)
        publisher = WeightPublisher(core, SharedMemoryTransport("train-step"))
        for _ in range(2):
            core.step(samples)
            bare.step()
            publisher.publish()
        parts = Parts(core)
        steps: list[float] = []
        publishes: list[float] = []
        bares: list[float] = []
        for _ in range(arguments.rounds):
            steps.append(parts.measured(lambda: core.step(samples)))
            bares.append(seconds(bare.step))
            publishes.append(parts.measured(publisher.publish))
        if arguments.profile:
            with torch.profiler.profile() as profile:
                core.step(samples)
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
            with torch.profiler.profile() as profile:
                bare.step()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))
        publisher.close()
    report("train_step_vs_bare", Spread([step / own for step, own in zip(steps, bares, strict=True)]), "ratio", 1.1)
    report("publish_vs_bare", Spread([each / own for each, own in zip(publishes, bares, strict=True)]), "ratio", 0.1)
    report("bare_step_ms", Spread([1e3 * each for each in bares]), "ms")
    report("train_step_ms", Spread([1e3 * each for each in steps]), "ms")
    for part, spent in sorted(parts.seconds.items(), key=lambda item: -item[1]):
        report(f"ms_{part.replace(' ', '_')}", 1e3 * spent / arguments.rounds, "ms")


if __name__ == "__main__":
    main()
