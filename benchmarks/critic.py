"""PPO with a critic against GRPO's loss, both with groups of one rollout: rollouts until a held-out reward is reached.

    python -m benchmarks.critic [--seeds 0 1 2 3 4] [--target 0.2] [--base FOLDER]

The task is `examples/distillation` with four sums in a prompt and the share of right ones as reward, which is known at
the end of the answer only. Runs start from the same model, which often gives up, and have the same prompts:

    grpo        the clipped ratio with the mean reward of the batch as baseline, since there are no siblings
    ppo         a critic that begins as a copy of the policy, and GAE over tokens
    ppo_head    a linear value of the policy's hidden states, and GAE over tokens
    ppo_lambda  the critic of ppo with lambda = 1: a baseline of each state, and no credit of single tokens

Rollouts are sampled by transformers in this process, each step with the present weights.

Prints one JSON object per line: {"name": ..., "value": ..., "target": ..., "unit": ...}. `critic_samples_vs_grpo` is
the median over the seeds of the rollouts that PPO needs over those of GRPO, where a run that does not reach it
counts with all of its steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.examples import run
from examples.distillation.task import Sums
from titan_rl.config.build import make_renderer
from titan_rl.rollout.renderer.tokenizer import load_tokenizer
from titan_rl.rollout.rewards.advantages import compare, find_advantage
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, Turn
from titan_rl.training.data.sample_builder import RewardPlacement, SampleMaker
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan

SUBJECT = ("titan_rl/training",)
"""Code that the figures depend on, for `scripts/stale_figures.py`."""

CONTEXT, MAX_TOKENS = 128, 40
TASK = {"questions": 4, "numbers": 2, "partial": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo", "advantage": "batch_mean"},
    "ppo": {"algorithm": "ppo"},
    "ppo_head": {"algorithm": "ppo", "critic": "head"},
    "ppo_lambda": {"algorithm": "ppo", "gae": (1.0, 1.0)},
}
BATCH, STEPS, INTERVAL, NUM_HELD_OUT = 64, 80, 2, 64


class Sampler:
    """Samples answers with transformers, at temperature 1."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._renderer = make_renderer(ModelConfig(path=str(folder), max_context=CONTEXT))
        self._tokenizer = load_tokenizer(str(folder))
        self._stops = sorted(self._renderer.get_stop_token_ids())

    def load(self, trainer: TrainerCore) -> None:
        """Take over the trainer's weights."""
        with torch.no_grad():
            own = dict(self._model.named_parameters())
            for name, tensor in trainer.named_tensors():
                own[name].copy_(tensor)

    @torch.no_grad()
    def answer(self, task: Sums, samples: list[Any], seed: int, version: int) -> list[RolloutGroup]:
        """A group of one scored rollout for each sample."""
        torch.manual_seed(seed)
        prompts = [
            self._renderer.render_ids([{"role": "user", "content": task.prompt(each)}], add_generation_prompt=True)
            for each in samples
        ]
        width = max(map(len, prompts))
        ids_BL = torch.tensor([[self._stops[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BL = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self._model.generate(
            input_ids=ids_BL,
            attention_mask=mask_BL,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0],
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs_BLV = torch.stack(made.logits, 1).log_softmax(-1)
        tokens_BL = made.sequences[:, width:]
        logprobs_BL = logprobs_BLV.gather(-1, tokens_BL[..., None])[..., 0]
        return [
            self._group(f"{seed}/{i}", task, sample, list(prompts[i]), tokens_BL[i].tolist(), logprobs_BL[i], version)
            for i, sample in enumerate(samples)
        ]

    def _group(
        self,
        name: str,
        task: Sums,
        sample: Any,
        prompt: list[int],
        tokens: list[int],
        logprobs_L: torch.Tensor,
        version: int,
    ) -> RolloutGroup:
        size = next((i + 1 for i, token in enumerate(tokens) if token in self._stops), len(tokens))
        ended = tokens[size - 1] in self._stops
        text = self._tokenizer.decode(tokens[: size - ended], skip_special_tokens=True)
        completion = Completion(
            name,
            tokens[:size],
            logprobs_L[:size].tolist(),
            FinishReason.STOP if ended else FinishReason.LENGTH,
            (VersionSpan(version, size),),
        )
        status = RolloutStatus.COMPLETED if ended else RolloutStatus.TRUNCATED_LENGTH
        turn = Turn(prompt, completion, sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0))
        reward = task.reward(sample, text) if ended else 0.0
        return RolloutGroup(name, sample, [Rollout(name, name, 0, sample, status, [turn], reward=reward)], task="sums")


def curve(kind: str, seed: int, folder: Path, target: float, threads: int) -> list[float]:
    """Held-out rewards every `INTERVAL` steps, up to the target."""
    settings = SETTINGS[kind]
    training = TrainingConfig(steps=STEPS, rows_per_micro_batch=4, **settings)
    trainer = TrainerCore(ModelConfig(path=str(folder), max_context=CONTEXT), training, seed=seed, num_threads=threads)
    sampler, task = Sampler(folder), Sums(**TASK)
    advantage = find_advantage(training.advantage)
    # The reward of a truncated answer is final, 0.
    placement = {"sums": RewardPlacement(truncation_ends=True)} if training.critic != "none" else None
    maker = SampleMaker({"sums": advantage}, episodes=placement)
    prompts, held_out = random.Random(f"train {seed}"), random.Random("held out")
    samples = [task.sample(held_out) for _ in range(NUM_HELD_OUT)]
    rewards: list[float] = []
    for step in range(STEPS + 1):
        if step % INTERVAL == 0:
            groups = sampler.answer(task, samples, seed=10**6 + seed, version=step)
            rewards.append(round(fmean(group.rollouts[0].reward or 0.0 for group in groups), 3))
            if rewards[-1] >= target or step == STEPS:
                break
        groups = sampler.answer(task, [task.sample(prompts) for _ in range(BATCH)], 1000 * seed + step, step)
        for group in groups:
            compare(group, advantage)
        metrics = trainer.step(maker.samples(groups, version=step)).metrics
        sampler.load(trainer)
        if step % 10 == 0:
            noted = {name: round(metrics[name], 3) for name in ("value_loss", "explained_variance") if name in metrics}
            where = f"seed {seed}, {kind}, step {step}, {time.process_time():.0f} s of a core"
            print(f"{where}: {rewards[-1]} {noted}", file=sys.stderr, flush=True)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--target", type=float, default=0.2, help="held-out reward to reach")
    parser.add_argument("--base", type=Path, help="folder of the student; by default it is made")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.base or Path(temporary) / "base"
        if not base.is_dir():
            run("titan_rl.cli.main", "sft", "examples/distillation/sparse.toml", "--model.path", str(base))
        curves: dict[str, list[list[float]]] = {kind: [] for kind in arguments.only}
        for seed in arguments.seeds:
            for kind in arguments.only:
                curves[kind].append(curve(kind, seed, base, arguments.target, arguments.threads))
                print(f"seed {seed}, {kind}: {curves[kind][-1]}", file=sys.stderr, flush=True)
    rollouts = {kind: [BATCH * INTERVAL * (len(rewards) - 1) for rewards in own] for kind, own in curves.items()}
    for kind in [kind for kind in arguments.only if kind != "grpo"]:
        ratios = [ppo / max(1, grpo) for ppo, grpo in zip(rollouts[kind], rollouts["grpo"], strict=True)]
        figure = {
            "name": "critic_samples_vs_grpo" if kind == "ppo" else f"{kind}_samples_vs_grpo",
            "value": round(median(ratios), 3),
            "target": 1.0,
            "unit": f"rollouts to a held-out reward of {arguments.target:g} over those of GRPO, groups of 1, below",
            "rollouts": {name: rollouts[name] for name in ("grpo", kind)},
            "last": {name: [rewards[-1] for rewards in curves[name]] for name in ("grpo", kind)},
        }
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
