"""The parts of a trainer, of the settings [model], [training] and [correction]: what takes these tables apart.

The parts themselves take plain arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from titan_rl.core.errors import ConfigError
from titan_rl.training.corrections import correct
from titan_rl.training.data.packing import StepPlan, plan_step
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.gradient_pass import GradientPass
from titan_rl.training.losses import ClipRange
from titan_rl.training.losses.kl import ESTIMATES
from titan_rl.training.losses.registry import find_loss
from titan_rl.training.objective import Objective
from titan_rl.training.optimizer.optimizers import Optimizers, learning_rate
from titan_rl.training.optimizer.registry import OptimizerSpec
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig


def make_policy(model: ModelConfig, training: TrainingConfig, world: World, *, is_trained: bool = True) -> Policy:
    """Build the policy, or the reference, which is not trained.

    Raises:
        ConfigError: the weights cannot be kept in `training.master_dtype`, or a single rank cannot offload parameters.
        ModelError: see `Policy`.
    """
    if training.master_dtype == "bfloat16" and model.dtype != "bfloat16":
        raise ConfigError(
            f'training.master_dtype = "bfloat16" with model.dtype = "{model.dtype}": the model would compute with more '
            'digits than its weights have; set model.dtype = "bfloat16", or leave master_dtype out'
        )
    if "parameters" in training.offload and world.size == 1:
        raise ConfigError(
            'training.offload = ["parameters"] with one trainer process: FSDP, which moves them, takes several; '
            'set training.data_parallel to the number of GPUs, or leave "parameters" out'
        )
    return Policy(
        Path(model.path),
        world,
        max_context=model.max_context,
        row_tokens=training.row_tokens,
        dtype=model.dtype,
        master_dtype=training.master_dtype,
        attention=training.attention,
        compile=training.compile,
        activation_checkpointing=training.activation_checkpointing,
        offload_activations="activations" in training.offload,
        offload_weights="reference" in training.offload and not is_trained,
        offload_parameters="parameters" in training.offload and is_trained,
    )


def make_reference(model: ModelConfig, training: TrainingConfig, world: World) -> Policy | None:
    """What the policy is held to, where it is. Raises what `Policy` does."""
    if not training.kl_coef:
        return None
    return make_policy(model, training, world, is_trained=False)


def make_gradient_pass(
    policy: Policy, model: ModelConfig, training: TrainingConfig, correction: CorrectionConfig, world: World
) -> GradientPass:
    """Raises what `make_reference` and `make_objective` do."""
    return GradientPass(
        policy,
        make_reference(model, training, world),
        make_objective(training, correction, model.max_context),
        world,
        max_grad_norm=training.max_grad_norm,
        row_tokens=training.row_tokens,
    )


def make_objective(training: TrainingConfig, correction: CorrectionConfig, max_context: int) -> Objective:
    """
    Raises:
        ConfigError: there is no such `training.loss`.
    """
    return Objective(
        find_loss(training.loss),
        ClipRange(training.clip_low, training.clip_high),
        max_context=max_context,
        average=training.average,
        proximal=correction.proximal,
        correct=partial(
            correct,
            weight=correction.weight,
            cap=correction.cap,
            mask=correction.mask,
            bounds=correction.bounds,
            veto=correction.veto,
        ),
        kl_coef=training.kl_coef,
        kl=ESTIMATES[training.kl],
    )


def make_optimizers(policy: Policy, training: TrainingConfig) -> Optimizers:
    """Raises what `Optimizers` does."""
    spec = OptimizerSpec(
        training.lr,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
        state_dtype=training.optimizer_dtype,
        offload=bool({"optimizer", "parameters"} & {*training.offload}),
    )
    return Optimizers(policy.model, training.optimizer, spec)


def make_schedule(training: TrainingConfig) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0."""
    return partial(
        learning_rate,
        steps=training.steps,
        lr=training.lr,
        warmup_steps=training.warmup_steps,
        decay=training.lr_decay,
        min_lr_ratio=training.min_lr_ratio,
    )


def make_planner(training: TrainingConfig) -> Callable[[Sequence[TrainingSample]], list[StepPlan]]:
    """`plan_step`, told how."""
    return partial(
        plan_step,
        row_tokens=training.row_tokens,
        rows_per_micro_batch=training.rows_per_micro_batch,
        minibatches=training.minibatches,
        ranks=training.data_parallel,
        share_prompts=training.share_prompts,
    )
