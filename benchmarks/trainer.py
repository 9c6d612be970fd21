"""Overhead of a training step beyond its forward, backward and optimizer step.

    python -m benchmarks.trainer [--repeats 9]

`TrainerCore.step` (packing, layout, loss, corrections, metrics) is compared with the same optimizer on torchtitan's
model with a cross-entropy loss, on the same packed rows, laid out in advance. They take turns, so that a drift of the
machine's speed affects both; ratios are medians. Also prints the share of padding in conversations like those of
alphabet-sort.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.generation import make_model
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import plan_step
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.tensor_batch import Minibatch
from titan_rl.training.trainer import TrainerCore

GROUPS, SIBLINGS = 16, 8


def conversations() -> list[TrainingSample]:
    """Conversations of two or three turns, with 60 to 240 tokens in total, half of them trained."""
    rng = random.Random(0)
    samples: list[TrainingSample] = []
    for group in range(GROUPS):
        for sibling in range(SIBLINGS):
            length = rng.choice((2, 3)) * rng.randint(30, 80)
            tokens = [rng.randrange(550) for _ in range(length)]
            mask = [(position // 15) % 2 == 1 for position in range(length)]
            logprobs = [-6.3 if trained else 0.0 for trained in mask]
            advantages = [rng.uniform(-1, 1) if trained else 0.0 for trained in mask]
            versions = [0 if trained else -1 for trained in mask]
            samples.append(
                TrainingSample(f"g{group}", f"g{group}/{sibling}", tokens, mask, logprobs, advantages, versions, 1.0)
            )
    return samples


class BareLoop:
    """Training loop of torchtitan's model and AdamW, on rows that are already tensors."""

    def __init__(self, model: ModelConfig, training: TrainingConfig, samples: Sequence[TrainingSample]) -> None:
        self._policy = TrainerCore(model, training, seed=0)._policy
        self._optimizer = torch.optim.AdamW(self._policy.model.parameters(), lr=training.peak_lr, fused=True)
        ((plan,),) = plan_step(samples, training)
        self.minibatch = Minibatch.from_plan(plan, self._policy.device, alone=True, lay_out=self._policy.lay_out)

    def step(self) -> None:
        self._optimizer.zero_grad()
        model = self._policy.model
        for batch in self.minibatch.batches:
            hidden_BLD = model(batch.token_ids_BL, batch.positions_BL, batch.layout)
            logits_NV = model.lm_head(hidden_BLD.flatten(0, 1).index_select(0, batch.predictors_N))
            F.cross_entropy(logits_NV, batch.targets_N, reduction="sum").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self._optimizer.step()


def seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    samples = conversations()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        model, training = ModelConfig(path=folder), TrainingConfig(steps=1000, lr=1e-6)
        trainer, bare = TrainerCore(model, training, seed=0), BareLoop(model, training, samples)
        for _ in range(2):
            trainer.step(samples)
            bare.step()
        pairs = [(seconds(lambda: trainer.step(samples)), seconds(bare.step)) for _ in range(repeats)]
    ratio = median(own_loop / own for own, own_loop in pairs)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    print(
        f"{num_tokens} tokens a step: {median(own for own, _ in pairs):.3f} s, bare {median(b for _, b in pairs):.3f} s"
    )
    padding = bare.minibatch.num_padding / bare.minibatch.num_positions
    for name, value, target, unit in (
        ("step_tokens_per_second_vs_torchtitan", ratio, 0.95, "ratio"),
        ("padding_fraction", padding, 0.05, "share, at most"),
    ):
        print(json.dumps({"name": name, "value": round(value, 3), "target": target, "unit": unit}))


if __name__ == "__main__":
    main()
