"""Functions that each rank runs in tests of sharded trainers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from e2e.tiny_policy import on_policy_samples, sequences
from numpy.typing import NDArray
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from titan_rl.training import policy as policy_module
from titan_rl.training.data.packing import Family
from titan_rl.training.data.sample import SampleRewards, TrainingSample
from titan_rl.training.parallel import World, full_tensor
from titan_rl.training.policy import Policy
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.tensor_batch import make_tensor_batch
from titan_rl.training.trainer import TrainerCore
from titan_rl.training.trainer_protocol import StepResult

LENGTHS = (50, 20, 33, 41, 64, 12, 27)


def three_steps(folder: Path, out: Path, *, resume: Path | None = None, **training: Any) -> list[dict[str, float]]:
    """Make three steps and write a checkpoint and an export to `out`. With `resume`, make one more step from it."""
    settings = TrainingConfig(
        **{"steps": 10, "lr": 1e-4, "row_tokens": 64, "rows_per_micro_batch": 2, "kl_coef": 0.1, **training}
    )
    correction = CorrectionConfig(proximal="recomputed", weight="token", cap=2.0)
    trainer = TrainerCore(ModelConfig(path=str(folder)), settings, correction, seed=0)
    samples = on_policy_samples(trainer, *LENGTHS, at_once=True)
    metrics = [trainer.step(samples).metrics for _ in range(3)]
    trainer.save(out / "checkpoint")
    trainer.export_hf(out / "export")
    if resume is not None:
        trainer.load(resume)
        metrics.append(trainer.step(samples).metrics)
    return metrics


def logprobs_and_kept_weights(folder: Path, *, data_parallel: int) -> tuple[list[float], int]:
    """Logprobs of a sequence in bfloat16, and the bytes of layer weights saved in bfloat16 for the backward pass. The
    head must not have the shape of a layer weight."""
    world = World.join(data_parallel=data_parallel)
    model = ModelConfig(path=str(folder), max_context=128, dtype="bfloat16")
    policy = Policy(model, TrainingConfig(row_tokens=80), world)
    size = 70  # so that no row, padded or not, has the shape of a weight
    blank = [0.0] * size
    sample = TrainingSample("", "", range(1, size + 1), [True] * size, blank, blank, [0] * size, temperature=1.0)
    batch = make_tensor_batch([[Family((sample,))]], policy.device, policy.lay_out)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    shapes = {shape for parameter in policy.model.layers.parameters() if len(shape := tuple(parameter.shape)) == 2}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_N, _ = policy.logprobs(batch)
    weights = [each for each in saved if each.dtype is torch.bfloat16 and {each.shape, each.shape[::-1]} & shapes]
    kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in weights}
    logprobs_N.sum().backward()
    return logprobs_N.tolist(), sum(kept.values())


def gradients_of_given_experts(folder: Path, **layout: int) -> tuple[list[float], dict[str, NDArray[np.float32]]]:
    """Logprobs of a sequence routed only to the first experts, and the gradients of their sum. The rank of the last
    experts gets no tokens. All ranks have the same sequence."""
    world = World.join(**layout)
    policy = Policy(ModelConfig(path=str(folder), max_context=128), TrainingConfig(row_tokens=80), world)
    size = 70
    blank = [0.0] * size
    sample = TrainingSample("", "", range(1, size + 1), [True] * size, blank, blank, [0] * size, temperature=1.0)
    batch = make_tensor_batch([[Family((sample,))]], policy.device, policy.lay_out)
    routers = policy._routers  # pyright: ignore[reportPrivateUsage]
    given_K = torch.arange(routers[0].top_k)
    shape = (*batch.token_ids_BL.shape, len(routers), len(given_K))
    logprobs_N, _ = policy.logprobs(replace(batch, experts_BLRK=given_K.expand(shape)))
    logprobs_N.sum().backward()
    gradients = {name: each.grad for name, each in policy.model.named_parameters() if each.grad is not None}
    return logprobs_N.tolist(), {name: (full_tensor(each) / world.size).numpy() for name, each in gradients.items()}


def step_without_one_rank(folder: Path, **training: Any) -> None:
    """Make a step in which the last rank fails instead of sending its tokens."""
    trainer = TrainerCore(ModelConfig(path=str(folder)), TrainingConfig(**training), CorrectionConfig(), seed=0)
    samples = on_policy_samples(trainer, *LENGTHS, at_once=True)
    if trainer.world.rank == trainer.world.size - 1:
        with patch.object(AllToAllTokenDispatcher, "dispatch", side_effect=RuntimeError("this rank ends")):
            trainer.step(samples)
    trainer.step(samples)


def step_skipped_and_step_made(folder: Path, **training: Any) -> tuple[list[StepResult], list[bool]]:
    """Make a step with an untrainable sample, which is skipped, and one without it. Also return, for each weight,
    whether it equals that of a trainer that made only the second step."""
    settings = TrainingConfig(**{"steps": 10, "row_tokens": 64, "rows_per_micro_batch": 2, **training})
    trainers = [TrainerCore(ModelConfig(path=str(folder)), settings, CorrectionConfig(), seed=0) for _ in range(2)]
    samples = on_policy_samples(trainers[0], *LENGTHS, at_once=True)
    poisoned = [replace(samples[0], advantages=[math.nan] * LENGTHS[0]), *samples[1:]]
    results = [trainers[0].step(poisoned, skip=True), trainers[0].step(samples, skip=True)]
    trainers[1].step(samples)
    pairs = zip(trainers[0].named_tensors(), trainers[1].named_tensors(), strict=True)
    return results, [torch.equal(found, expected) for (_, found), (_, expected) in pairs]


def long_row(model: dict[str, Any], training: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
    """Logprobs of a sequence as long as a row under the published weights, and the metrics of a step."""
    config = ModelConfig(**model)
    trainer = TrainerCore(config, TrainingConfig(**training), CorrectionConfig(), seed=0)
    (sequence,) = sequences(config.max_context)
    return trainer.score_published([sequence])[0], trainer.step(on_policy_samples(trainer, config.max_context)).metrics


def steps_and_resumed_steps(
    folder: Path, out: Path, saved: Path | None = None, **training: Any
) -> tuple[list[float], list[float]]:
    """Losses of four steps in bfloat16, and of the last two repeated from a checkpoint of the first two.

    Args:
        saved: Checkpoint to resume from. Defaults to the one written here, `out / "saved"`.
    """
    settings = TrainingConfig(**{"steps": 10, "lr": 1e-3, "row_tokens": 64, "rows_per_micro_batch": 2, **training})
    config = ModelConfig(path=str(folder), dtype="bfloat16")
    whole, resumed = (TrainerCore(config, settings, CorrectionConfig(), seed=0) for _ in range(2))
    samples = on_policy_samples(whole, *LENGTHS, at_once=True)
    losses = [whole.step(samples).metrics["loss"] for _ in range(2)]
    whole.save(out / "saved")
    losses += [whole.step(samples).metrics["loss"] for _ in range(2)]
    resumed.load(saved or out / "saved")
    return losses, [resumed.step(samples).metrics["loss"] for _ in range(2)]


def devices_of_a_policy(folder: Path, *, offload_parameters: bool, **layout: int) -> tuple[set[str], set[str], bool]:
    """Device types of the parameters and of the buffers of a model that computes on the meta device, and whether FSDP
    moves the parameters there for each pass."""
    training = TrainingConfig(row_tokens=8, offload=("parameters",) if offload_parameters else ())
    with patch.object(policy_module, "local_device", return_value=torch.device("meta")):
        model = Policy(ModelConfig(path=str(folder), max_context=8), training, World.join(**layout)).model
    states: list[Any] = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    (is_moved,) = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups}
    return {each.device.type for each in model.parameters()}, {each.device.type for each in model.buffers()}, is_moved


def drawn(folder: Path, **training: Any) -> list[list[int]]:
    """Sequences sampled from the policy."""
    settings = TrainingConfig(**{"steps": 1, "lr": 1e-4, **training})
    trainer = TrainerCore(ModelConfig(path=str(folder)), settings, CorrectionConfig(), seed=0)
    return trainer.draw(3, 6, seed=0)


def with_rewards(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Samples with alternating rewards of 1 and 0 at the last token, and zero advantages."""
    return [
        replace(
            sample,
            advantages=[0.0] * len(sample.token_ids),
            episode=SampleRewards(
                rewards=[0.0] * (len(sample.token_ids) - 1) + [float(index % 2 == 0)],
                turns=[0 if trained else -1 for trained in sample.loss_mask],
            ),
        )
        for index, sample in enumerate(samples)
    ]


def steps_with_a_critic(folder: Path, out: Path, **training: Any) -> list[dict[str, float]]:
    """Make three steps with a critic, and write a checkpoint and an export to `out`."""
    settings = TrainingConfig(**{"steps": 10, "lr": 1e-4, "row_tokens": 64, "rows_per_micro_batch": 2, **training})
    trainer = TrainerCore(ModelConfig(path=str(folder)), settings, CorrectionConfig(), seed=0)
    samples = with_rewards(on_policy_samples(trainer, *LENGTHS, at_once=True))
    episodes = [replace(each.episode, is_truncated=True, ends_rollout=False) for each in samples if each.episode]
    episodes[-1] = replace(episodes[-1], ends_rollout=True)  # the samples are one rollout with edited histories
    samples = [replace(each, rollout_id="g/0", episode=own) for each, own in zip(samples, episodes, strict=True)]
    metrics = [trainer.step(samples).metrics for _ in range(3)]
    trainer.save(out / "checkpoint")
    trainer.export_hf(out / "export")
    return metrics
