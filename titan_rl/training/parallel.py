"""A model whose parameters are spread over the ranks of a world: FSDP2, tensor parallel, or both, by torchtitan."""

from __future__ import annotations

from typing import Any

import torch

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.config.sections import TrainingConfig
from titan_rl.training.world import World

# isort: split
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.config import TrainingConfig as TitanTraining
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

_CHECKPOINTING = {"full": FullAC.Config, "selective": SelectiveAC.Config}


def plan_sharding(model_config: Any, world: World) -> None:
    """Write into a model's config, before it is built, how tensor parallel splits it."""
    if world.tensor_parallel > 1:
        set_qwen3_sharding_config(model_config, enable_sp=False, enable_ep=False)


def parallelize(model: Any, world: World, training: TrainingConfig) -> None:
    """Checkpoint activations as the settings say and, in a world of several ranks, spread the parameters, in place.

    Gradients are summed over the ranks, not averaged: the loss has a denominator of its own.
    """
    checkpointing = _CHECKPOINTING.get(training.activation_checkpointing)
    if world.size == 1:
        if checkpointing is not None:
            checkpointing().build(dump_folder="").apply(model)
        return
    parallelize_qwen3(
        model,
        parallel_dims=world.dims,
        training=TitanTraining(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(),
        ac_config=checkpointing() if checkpointing is not None else None,  # pyright: ignore[reportArgumentType]
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo can do no other


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that the ranks hold parts of. Called by all of them; one that is whole already is returned as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that every rank holds whole, as a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
