"""GRPO in one process and one loop, without actors or a controller. Read this first.

    python -m examples.minimal --steps 30

Each step runs conversations with the current weights, scores them, makes one optimizer step, and loads the new weights
into the engine. `titan-rl train` adds separate processes for generators and trainer, which work at the same time,
validation, checkpoints, verification of weights, and an orderly shutdown.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import fmean

from examples.alphabet_sort.env import AlphabetSortEnv
from examples.alphabet_sort.task import AlphabetSort
from titan_rl import (
    ChatTemplateRenderer,
    EngineLoop,
    GroupScheduler,
    Lease,
    MessageTokenEnv,
    Rollouter,
    RolloutGroup,
    SamplingParams,
    SchedulingConfig,
    build_samples,
)
from titan_rl.generation.engine import EngineSpec
from titan_rl.generation.vllm_engine import VLLMEngine
from titan_rl.training.settings import ModelConfig, TrainingConfig
from titan_rl.training.trainer import TrainerCore

BASE_MODEL = Path(__file__).parent / "alphabet_sort" / "base"


async def train(model_path: str, *, steps: int, groups_per_step: int, group_size: int, seed: int) -> list[float]:
    """Train, and return the mean reward of each step's rollouts."""
    model = ModelConfig(path=model_path, max_context=256)
    task = AlphabetSort(pool_size=24, min_turns=2, max_first_names=3, max_new_names=2)
    renderer = ChatTemplateRenderer.from_pretrained(model_path)
    sampling = SamplingParams(max_tokens=64, temperature=1.0, stop_token_ids=tuple(renderer.get_stop_token_ids()))
    trainer = TrainerCore(model, TrainingConfig(steps=steps, row_tokens=256, rows_per_micro_batch=16), seed=seed)
    rollouter = Rollouter(
        lambda sample: MessageTokenEnv(AlphabetSortEnv(sample), renderer),
        task.rubric(),
        max_context=model.max_context,
        seed=seed,
    )

    async def run_group(lease: Lease) -> RolloutGroup:
        return await rollouter.run_group(
            engine.generate,
            task.train_sample(seed, lease.index),
            group_id=f"g{lease.index}",
            group_size=group_size,
            sampling=sampling,
        )

    rewards: list[float] = []
    scheduling = SchedulingConfig(groups_per_step=groups_per_step, max_staleness=0)  # with 1, generate while training
    budget = steps * groups_per_step
    engine = EngineLoop(lambda: VLLMEngine(EngineSpec(model_path, max_context=model.max_context, kv_cache_gib=0.5)))
    try:
        await engine.start()
        async with GroupScheduler(run_group, scheduling, group_size=group_size, budget=budget) as scheduler:
            start = time.monotonic()
            async for batch in scheduler.batches():
                samples = [s for group in batch.groups for s in build_samples(group)]
                result = await asyncio.to_thread(trainer.step, samples)
                await engine.pull(result.version, trainer.named_tensors)

                rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
                rewards.append(fmean(rollout.reward for rollout in rollouts if rollout.reward is not None))
                print(
                    f"step {result.version}/{steps}  reward {rewards[-1]:.3f}  "
                    f"tokens {sum(rollout.num_completion_tokens for rollout in rollouts)}  "
                    f"loss {result.metrics['loss']:+.4f}  {time.monotonic() - start:.1f} s",
                    flush=True,
                )
                start = time.monotonic()
    finally:
        await engine.close()
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BASE_MODEL), help="Hugging Face folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups-per-step", type=int, default=16, help="prompts of one optimizer step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of one prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(
        train(
            args.model,
            steps=args.steps,
            groups_per_step=args.groups_per_step,
            group_size=args.group_size,
            seed=args.seed,
        )
    )


if __name__ == "__main__":
    main()
