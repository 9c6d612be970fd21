"""Trainer of one policy: its model, its optimizers, and a step for each batch of samples."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from titan_rl.core.errors import CheckpointError, ConfigError, TrainingError, UntrainableError
from titan_rl.core.tracing.spans import IDLE, span
from titan_rl.rollout.renderer.registry import TemplateFit, fit_template
from titan_rl.training.critic import Critic
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.data.step_plan import Costs, StepPlan, plan_step
from titan_rl.training.export import export_hf
from titan_rl.training.family_check import require_proved
from titan_rl.training.gradient_pass import GradientPass, MinibatchGradient
from titan_rl.training.models.lora import Adapter
from titan_rl.training.objective import Objective, TokenStats, token_metrics
from titan_rl.training.optimizer.optimizers import Optimizers
from titan_rl.training.optimizer.registry import OptimizerSpec
from titan_rl.training.parallel import World, local
from titan_rl.training.policy import InitialAdapter, Policy, Reference
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.state.train_state import TrainState, TrainStateWriter, load_train_state
from titan_rl.training.tensor_batch import Minibatch, packing_metrics
from titan_rl.training.trainer_protocol import SkippedMinibatch, StepResult
from titan_rl.weights.types import TensorSlice

READ_LIMIT_S = 300.0
"""Time limit for a copy of the weights, in seconds."""


class Readers:
    """Reads of the weights by other threads. A read is in progress until its future is done."""

    def __init__(self) -> None:
        self._reads: list[Future[Any]] = []

    def add(self, read: Future[Any]) -> None:
        self._reads.append(read)

    def wait(self) -> float:
        """Wait for all reads. Their errors are handled by the threads that began them.

        Returns:
            Seconds waited; exactly 0 if there was no read.

        Raises:
            TrainingError: A read does not end within `READ_LIMIT_S`.
        """
        if not self._reads:
            return 0.0
        began = time.monotonic()
        if pending := wait(self._reads, timeout=READ_LIMIT_S).not_done:
            raise TrainingError(
                f"{len(pending)} copies of the weights have not finished after {READ_LIMIT_S:g} s; "
                "no weight may change before they have"
            )
        self._reads.clear()
        return time.monotonic() - began


class TrainerCore:
    """Trainer of one policy in this process. A plain class without Monarch. Not thread-safe.

    Weights and optimizer state are float32 unless `master_dtype` and `optimizer_dtype` differ. With
    `dtype = "bfloat16"` the forward pass runs in bfloat16, and published and exported weights are bfloat16.

    Args:
        seed: Seed of torch's random state. Equal seeds, weights and samples give bit-identical results on one machine.
        num_threads: Number of micro-batches to compute at the same time on CPUs. It does not change the results.
        base: Trainer of another adapter of the same model, whose frozen weights this one shares; see `AdapterTrainers`.

    Raises:
        ModelError: The folder lacks a file, or its config and weights do not fit together.
        ConfigError: `training.loss` or `training.optimizer` does not exist, or settings contradict each other.

    Example:

        trainer = TrainerCore(ModelConfig(path="models/tiny"), TrainingConfig(steps=10), seed=0)
        result = trainer.step(build_samples(group))
        result.version  # 1
    """

    def __init__(
        self,
        model_config: ModelConfig,
        training: TrainingConfig,
        correction: CorrectionConfig | None = None,
        *,
        seed: int,
        num_threads: int = 1,
        base: TrainerCore | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self._config = model_config
        self._training = training
        self._world = World.join(
            data_parallel=training.data_parallel,
            context_parallel=training.context_parallel,
            tensor_parallel=training.tensor_parallel,
            expert_parallel=training.expert_parallel,
        )
        _check_weights(model_config, training, self._world)
        require_proved(Path(model_config.path), model_config.implementation)
        self._policy = Policy(
            model_config, training, self._world, seed=seed, base=None if base is None else base._policy
        )
        self._model = self._policy.model
        self._reference = self._make_reference()
        objective = Objective(training, correction or CorrectionConfig(), max_context=model_config.max_context)
        self._gradient_pass = GradientPass(
            self._policy, self._reference, objective, training, self._world, num_threads=num_threads
        )
        self._optimizers = _make_optimizers(self._policy, training)
        self._critic = self._make_critic()
        self._costs = Costs.of_model(Path(model_config.path))
        self._writer = TrainStateWriter(self._world)
        self._readers = Readers()
        self._version = 0
        self._is_between_versions = False  # whether a step failed after some of its minibatches had changed the weights

    def _make_reference(self) -> Reference | None:
        if not self._training.kl_coef:
            return None
        if self._policy.adapter is not None:
            return InitialAdapter(self._policy)
        return Policy(self._config, self._training, self._world, role="reference")

    def _make_critic(self) -> Critic | None:
        if self._training.critic == "none":
            return None
        trunk = self._policy
        if self._training.critic == "model":
            trunk = Policy(self._config, self._training, self._world, role="trunk")
        return Critic(trunk, self._world, self._training)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is trained; None if all weights are trained."""
        return self._policy.adapter

    @property
    def _state(self) -> TrainState:
        """State for a checkpoint: that of the policy, of a critic, and of a reference model that is updated."""
        others = {} if self._critic is None else dict(self._critic.state)
        if self._training.reference_interval and isinstance(self._reference, Policy):
            others["reference"] = (self._reference.model, ())
        adapter = None if self.adapter is None else self.adapter.settings
        return TrainState((self._model, self._optimizers.parts), adapter, others)

    @property
    def version(self) -> int:
        """Policy version of the current weights: 0 for the initial weights, and one more after each step."""
        return self._version

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which weights are published and exported: `model.dtype`."""
        return self._policy.dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's computations."""
        return self._policy.device

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a sequence: `model.max_context`."""
        return self._config.max_context

    @property
    def world(self) -> World:
        """The ranks that train this policy together."""
        return self._world

    def step(self, samples: Sequence[TrainingSample], *, skip: bool = False) -> StepResult:
        """Run one step over all samples: an optimizer step for each of `training.minibatches`, in as many micro-batches
        as they need. The split into micro-batches and over ranks does not change the step.

        Every rank must be given all samples. With `train`, a rank is given only its own rows.

        Args:
            skip: Leave out minibatches that cannot be trained on, instead of raising `UntrainableError`, and name them
                in the result. The version increases by one even if every minibatch is skipped.

        Raises:
            UntrainableError: A minibatch has no token to train on, a token id is outside the vocabulary, or the loss or
                the gradient is not finite. Weights, optimizer state and version are those before that minibatch.
        """
        return self.train(plan_step(samples, self._training, self._costs)[self._world.data_rank], skip=skip)

    def train(self, plan: StepPlan, *, skip: bool = False) -> StepResult:
        """Run this rank's share of a step: the plan that `plan_step` made for its data-parallel rank.

        Args:
            skip: Whether to leave out minibatches that cannot be trained on; see `step`. It must be the same on all
                ranks.

        Raises:
            UntrainableError: A minibatch cannot be trained on; see `step`. Raised on all ranks.
        """
        minibatches, refused = self._minibatches(plan)
        if refused and not skip:
            raise refused[0]
        judged: dict[str, float] = {}
        if self._critic is not None:
            minibatches, judged = self._critic.judge(minibatches)
        proximal = self._gradient_pass.proximal_logprobs(minibatches)
        lr = learning_rate(self._version, self._training)
        gradients: list[MinibatchGradient] = []
        value_losses: list[float] = []
        waited_s = 0.0
        for minibatch in minibatches:
            try:
                gradient, waiting_s = self._update(minibatch, proximal, lr, value_losses)
                gradients.append(gradient)
                waited_s += waiting_s
            except UntrainableError as error:
                if not skip:
                    raise
                refused.append(error)
        metrics = {
            "lr": lr,
            **packing_metrics(minibatches, self._world),
            "wait_for_copy_s": waited_s,
            "num_tokens": 0.0,
        }
        if gradients:
            stats = TokenStats.concatenate([gradient.stats for gradient in gradients])
            metrics |= {
                "loss": fmean(gradient.loss for gradient in gradients),
                "grad_norm": fmean(gradient.norm for gradient in gradients),
                **token_metrics(stats, self._version, self._world),
            }
        if value_losses:
            metrics |= {"value_loss": fmean(value_losses), **judged}
        self._version += 1
        self._is_between_versions = False
        self._update_reference()
        skipped = (SkippedMinibatch(error.reason, error.rollout_ids, error.at_fault) for error in refused)
        return StepResult(self._version, metrics, tuple(skipped))

    def measure(self, samples: Sequence[TrainingSample]) -> float:
        """Compute the loss of samples under the current weights, which do not change.

        Every rank must be given all samples. With `measure_plan`, a rank is given only its own rows.

        Raises:
            TrainingError: The samples have no token to measure, a token id is outside the vocabulary, or the loss is
                not finite.
        """
        return self.measure_plan(plan_step(samples, self._training, self._costs)[self._world.data_rank])

    def measure_plan(self, plan: StepPlan) -> float:
        """Run this rank's share of `measure`. Errors are raised on all ranks."""
        minibatches, refused = self._minibatches(plan)
        if refused:
            raise refused[0]
        return fmean(self._gradient_pass.measure(minibatch, version=self._version) for minibatch in minibatches)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Compute the logprobs at temperature 1 of each sequence's tokens after the first, under the current weights.

        Returns:
            Logprobs as [num_sequences][len(sequence) - 1].

        Raises:
            TrainingError: A token id is outside the vocabulary.
            ValueError: A sequence is longer than model.max_context.
        """
        return self._policy.score(sequences)

    def score_published(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Score like `score`, with the weights as published, in `model.dtype`, but computing in float32, so that every
        engine's logprobs are close to the result."""
        with self._policy.as_published():
            return self.score(sequences)

    def draw(self, num_sequences: int, length: int, seed: int) -> list[list[int]]:
        """Sample sequences from the current policy at temperature 1, after a random first token. Needs one forward pass
        per token, so it is meant for a few short probe sequences, not for rollouts.

        Returns:
            Token ids as [num_sequences][length].
        """
        return self._policy.draw(num_sequences, length, seed)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all parameters with their Hugging Face names, whole and in `model.dtype`. An adapter is merged
        into them. All ranks iterate at the same time.

        In float32 the tensors of a single rank share the trainer's memory: copy them before the next step. With tied
        embeddings there is no `lm_head.weight`.
        """
        return self._policy.named_tensors()

    def held_slices(self) -> list[tuple[str, TensorSlice]]:
        """Slices of parameters that this rank publishes, with their Hugging Face names: those of the adapter if there
        is one. Together the ranks publish each element once.

        All ranks call this at the same time. The slices have `training.master_dtype` and share the trainer's memory,
        except for gathered tensors (see `titan_rl.training.models.hf_model`): copy them before the next step.
        """
        return self._policy.held_slices()

    def hold_weights(self, until: Future[Any]) -> None:
        """Prevent steps from changing a weight until a future is done, because another thread reads the weights until
        then. An error of the future is ignored here."""
        self._readers.add(until)

    def save(self, directory: str | Path) -> None:
        """Write model, optimizers, version and random state. After a `load` on the same number of ranks, training
        continues bit-identically.

        The folder appears whole or not at all; an existing one is replaced.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: str | Path, files: Mapping[str, str] | None = None) -> None:
        """Begin a `save`, and return once everything is copied; the next step may then begin.

        Args:
            files: Texts of further files of the folder, by file name.

        Raises:
            CheckpointError: A step failed after some of its minibatches had changed the weights, which therefore have
                no version.
        """
        if self._is_between_versions:
            raise CheckpointError(
                f"step {self._version + 1} failed after some of its minibatches: the weights have no version and are "
                "not saved"
            )
        self._writer.begin(Path(directory), self._state, self._version, files or {})

    def finish_save(self) -> None:
        """Wait until the folder begun last is complete. Other threads may call this.

        Raises:
            NoSpaceError: The disk is full.
            CheckpointError: The checkpoint could not be written for another reason.
        """
        self._writer.finish()

    def load(self, directory: str | Path) -> None:
        """Continue from a checkpoint, which may be of another number of ranks. Every byte is verified first.

        Raises:
            DamagedCheckpointError: The checkpoint's bytes are not those that were written. The trainer is unchanged.
            CheckpointError: The checkpoint does not exist, or it is of another model. The trainer may have loaded a
                part of it and must no longer be used.
        """
        self._readers.wait()
        self._version = load_train_state(Path(directory), self._state, self._world)
        self._is_between_versions = False

    def export_hf(self, directory: str | Path, fit: TemplateFit | None = None) -> None:
        """Write a Hugging Face folder: weights, config, and the tokenizer files of the model's original folder, with a
        chat template that keeps the same reasoning as the prompts of training. Tensors of the original folder that are
        not trained are copied.

        Args:
            fit: Fit of the model's chat template. By default, it is determined here, which imports transformers.

        Raises:
            CheckpointError: The folder could not be written.
        """
        tensors = self.named_tensors()
        try:
            if self._world.is_first:
                source, dtype = Path(self._config.path), self._config.dtype
                template = (fit or fit_template(source, self._config.renderer)).template
                layout, every = self._policy.layout(), chain(tensors, self._policy.untrained_tensors())
                export_hf(Path(directory), layout, every, source=source, dtype=dtype, chat_template=template)
        finally:
            deque(tensors, maxlen=0)  # every rank sends its parts to the first one, even if the disk is full
        self._world.barrier()

    def _minibatches(self, plan: StepPlan) -> tuple[list[Minibatch], list[UntrainableError]]:
        """Lay out the minibatches of a plan as tensors. Return those that fit the model, and an error for each
        minibatch with a sample that does not fit it on some rank. All ranks return the same errors."""
        device, lay_out, alone = self._policy.device, self._policy.lay_out, self._world.size == 1
        minibatches = [Minibatch.from_plan(minibatch, device, alone=alone, lay_out=lay_out) for minibatch in plan]
        fitting: list[Minibatch] = []
        refused: list[UntrainableError] = []
        by_rank = self._world.gather([self._complaint(minibatch) for minibatch in minibatches])
        for minibatch, complaints in zip(minibatches, zip(*by_rank, strict=True), strict=True):
            reason = next((reason for reason, _ in complaints if reason), None)
            if reason is None:
                fitting.append(minibatch)
            else:
                rollout_ids = dict.fromkeys(each for _, own in complaints for each in own)
                refused.append(UntrainableError(reason, list(rollout_ids)))
        return fitting, refused

    def _complaint(self, minibatch: Minibatch) -> tuple[str | None, list[str]]:
        """Reason why this rank cannot score a minibatch, or None, and the rollouts of this rank in the minibatch."""
        complaints = (self._policy.complaint(batch) for batch in minibatch.batches)
        return next((each for each in complaints if each is not None), None), minibatch.rollout_ids

    def _update(
        self, minibatch: Minibatch, proximal: dict[int, torch.Tensor], lr: float, value_losses: list[float]
    ) -> tuple[MinibatchGradient, float]:
        """Run one optimizer step; after an error, nothing has changed. Gradients take memory only during the step.

        Args:
            value_losses: List to which the critic's loss is appended.

        Returns:
            The gradient, and the seconds spent waiting for reads of the weights.
        """
        try:
            with span("forward and backward", "trainer", positions=minibatch.num_positions):
                gradient = self._gradient_pass.run(minibatch, proximal, version=self._version)
            with span("waiting for the copy", f"trainer,{IDLE}"):
                waited_s = self._readers.wait()
            if self._critic is not None:
                value_losses.append(self._critic.update(minibatch, lr))
            self._is_between_versions = True
            with span("optimizer", "trainer"):
                self._optimizers.step(lr)
        finally:
            self._optimizers.zero_grad()
        return gradient, waited_s

    def _update_reference(self) -> None:
        """Set the reference model to the policy, every `training.reference_interval` steps (ProRL, arXiv:2505.24864,
        section 2.3.2; for games R-NaD, arXiv:2206.15378)."""
        interval = self._training.reference_interval
        if not interval or self._version % interval or not isinstance(self._reference, Policy):
            return
        pairs = zip(self._reference.model.state_dict().values(), self._model.state_dict().values(), strict=True)
        with torch.no_grad():
            for kept, current in pairs:
                local(kept).copy_(local(current))  # sharded alike; offloaded parameters are not on the GPU


def _check_weights(model: ModelConfig, training: TrainingConfig, world: World) -> None:
    """Check the settings by which weights are kept and moved.

    Raises:
        ConfigError: The weights cannot be kept in `training.master_dtype`, or a single rank cannot offload parameters.
    """
    if training.master_dtype == "bfloat16" and model.dtype != "bfloat16":
        raise ConfigError(
            f'training.master_dtype = "bfloat16" with model.dtype = "{model.dtype}": the model would compute with more '
            'precision than its weights have; set model.dtype = "bfloat16", or leave master_dtype out'
        )
    if "parameters" in training.offload and world.size == 1:
        raise ConfigError(
            'training.offload = ["parameters"] with one trainer process: FSDP, which moves them, needs several; '
            'set training.data_parallel to the number of GPUs, or leave "parameters" out'
        )


def _make_optimizers(policy: Policy, training: TrainingConfig) -> Optimizers:
    spec = OptimizerSpec(
        training.peak_lr,
        betas=training.betas,
        weight_decay=training.weight_decay,
        state_dtype=training.optimizer_dtype,
        offload=training.offloads_moments,
    )
    return Optimizers(policy.model, training.optimizer, spec)


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Learning rate of one optimizer step: a linear warm-up to `lr`, then `lr_decay` down to `lr * min_lr_ratio`.

    The last warm-up step has the full rate; step `decay_steps`, by default the last one of the run, has exactly
    `lr * min_lr_ratio`, unless the rate is constant. Later steps keep that rate.

    Args:
        step: Index of the step, counted from 0.

    Example: for lr 1.0, 2 warm-up steps and a linear decay to 0.0 over 6 steps, the rates are 0.5, 1.0, 0.75, 0.5,
    0.25, 0.0.
    """
    if step < training.warmup_steps:
        return training.peak_lr * (step + 1) / training.warmup_steps
    if training.lr_decay == "constant":
        return training.peak_lr
    peak = max(training.warmup_steps - 1, 0)
    end = (training.decay_steps or training.steps) - 1
    progress = min((step - peak) / max(end - peak, 1), 1.0)
    remaining = 1 - progress if training.lr_decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return training.peak_lr * (training.min_lr_ratio + (1 - training.min_lr_ratio) * remaining)
