"""The trainer of one policy: torchtitan's model, an optimizer, and a step for each batch of samples."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from titan_rl.core.errors import CheckpointError, ConfigError, TrainingError, UntrainableError
from titan_rl.core.tracing.spans import IDLE, span
from titan_rl.rollout.renderer.registry import fit_template
from titan_rl.training.algorithm import Algorithm
from titan_rl.training.data.packing import StepPlan, plan_step
from titan_rl.training.data.sample import TrainingSample
from titan_rl.training.export import export_hf
from titan_rl.training.gradient_pass import GradientPass, MinibatchGradient
from titan_rl.training.objective import TokenStats, token_metrics
from titan_rl.training.optimizer.optimizers import Optimizers, learning_rate
from titan_rl.training.optimizer.registry import OptimizerSpec
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy, draw, score
from titan_rl.training.protocol import SkippedMinibatch, StepResult
from titan_rl.training.settings import CorrectionConfig, ModelConfig, TrainingConfig
from titan_rl.training.state.train_state import TrainStateWriter, load_train_state
from titan_rl.training.tensor_batch import Minibatch, packing_metrics
from titan_rl.weights.types import TensorSlice

READ_LIMIT_S = 300.0
"""Longest wait."""


class Readers:
    """Reads that have begun, each until its future is done."""

    def __init__(self) -> None:
        self._reads: list[Future[Any]] = []

    def add(self, read: Future[Any]) -> None:
        self._reads.append(read)

    def wait(self) -> float:
        """Wait for all reads. How they ended is for those who began them.

        Returns:
            seconds waited; exactly 0 where there was no read.

        Raises:
            TrainingError: one does not come to its end.
        """
        if not self._reads:
            return 0.0
        began = time.monotonic()
        if pending := wait(self._reads, timeout=READ_LIMIT_S).not_done:
            raise TrainingError(
                f"{len(pending)} copies of the weights have not ended after {READ_LIMIT_S:g} s; "
                "no weight may change before"
            )
        self._reads.clear()
        return time.monotonic() - began


@dataclass(frozen=True, slots=True)
class _Update:
    """One optimizer step."""

    gradient: MinibatchGradient
    waited_s: float  # for those who read the weights


class TrainerCore:
    """Trains one policy in this process. A plain class: an actor only wraps it. Not thread-safe.

    Weights and optimizer state are float32 unless `master_dtype` and `optimizer_dtype` say otherwise. With
    `dtype = "bfloat16"` the forward pass runs in bfloat16, and published and exported weights are bfloat16.

    Args:
        seed: of torch's random state; the same seed, weights and samples give the same bits on one machine.

    Raises:
        ModelError: the folder lacks a file, or its config and weights do not fit together.
        ConfigError: there is no such `training.loss` or `training.optimizer`, or it is not what it has to be.

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
    ) -> None:
        torch.manual_seed(seed)
        self._config = model_config
        self._world = World.join(
            data_parallel=training.data_parallel,
            context_parallel=training.context_parallel,
            tensor_parallel=training.tensor_parallel,
        )
        self._policy = _make_policy(model_config, training, self._world)
        self._model = self._policy.model
        algorithm = Algorithm(training, correction)
        self._gradient_pass = GradientPass(
            self._policy,
            _make_policy(model_config, training, self._world, is_trained=False) if algorithm.uses_reference else None,
            algorithm.objective(model_config.max_context),
            self._world,
            max_grad_norm=training.max_grad_norm,
            row_tokens=training.row_tokens,
        )
        self._optimizers = _make_optimizers(self._policy, training)
        self._learning_rate = partial(
            learning_rate,
            steps=training.steps,
            lr=training.lr,
            warmup_steps=training.warmup_steps,
            decay=training.lr_decay,
            min_lr_ratio=training.min_lr_ratio,
        )
        self._plan = make_planner(training)
        self._writer = TrainStateWriter(self._world)
        self._readers = Readers()
        self._version = 0
        self._is_between_versions = False  # some minibatches of a step have changed the weights, and not all

    @property
    def version(self) -> int:
        """The policy version of the current weights: 0 as loaded, one more after each step."""
        return self._version

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which weights are published and exported: `model.dtype`."""
        return self._policy.dtype

    @property
    def max_context(self) -> int:
        """Most tokens of a sequence: `model.max_context`."""
        return self._config.max_context

    @property
    def world(self) -> World:
        """The ranks that train this policy together."""
        return self._world

    def step(self, samples: Sequence[TrainingSample], *, skip: bool = False) -> StepResult:
        """Run one step over all samples: an optimizer step for each of `training.minibatches`, in as many micro-batches
        as they need. The split into micro-batches and over ranks does not change the step.

        Every rank is given all samples; `train` is for one that is given its own rows alone.

        Args:
            skip: go on without the minibatches that cannot be trained on, instead of raising `UntrainableError`, and
                name them in the result. The version grows by one even where every minibatch is skipped.

        Raises:
            UntrainableError: a minibatch has no token to train on, a token id is outside the vocabulary, or loss or
                gradient is not finite. Weights, optimizer state and version are as before that minibatch.
        """
        return self.train(self._plan(samples)[self._world.data_rank], skip=skip)

    def train(self, plan: StepPlan, *, skip: bool = False) -> StepResult:
        """This rank's share of a step: the part of `plan_step` for its data-parallel rank.

        Args:
            skip: see `step`; the same on all ranks.

        Raises:
            UntrainableError: see `step`; on all ranks alike.
        """
        minibatches, refused = self._minibatches(plan)
        if refused and not skip:
            raise refused[0]
        proximal = self._gradient_pass.proximal_logprobs(minibatches)
        lr = self._learning_rate(self._version)
        updates: list[_Update] = []
        for minibatch in minibatches:
            try:
                updates.append(self._update(minibatch, proximal, lr))
            except UntrainableError as error:
                if not skip:
                    raise
                refused.append(error)
        metrics = {
            "lr": lr,
            **packing_metrics(minibatches, self._world),
            "wait_for_copy_s": sum(update.waited_s for update in updates),
            "num_tokens": 0.0,
        }
        if updates:
            stats = TokenStats.concatenate([update.gradient.stats for update in updates])
            metrics |= {
                "loss": fmean(update.gradient.loss for update in updates),
                "grad_norm": fmean(update.gradient.norm for update in updates),
                **token_metrics(stats, self._version, self._world),
            }
        self._version += 1
        self._is_between_versions = False
        skipped = (SkippedMinibatch(error.reason, error.rollout_ids, error.at_fault) for error in refused)
        return StepResult(self._version, metrics, tuple(skipped))

    def measure(self, samples: Sequence[TrainingSample]) -> float:
        """The loss of samples under the current weights, which stay as they are.

        Every rank is given all samples; `measure_plan` is for one that is given its own rows alone.

        Raises:
            TrainingError: there is no token to measure, a token id is outside the vocabulary, or the loss is not
                finite.
        """
        return self.measure_plan(self._plan(samples)[self._world.data_rank])

    def measure_plan(self, plan: StepPlan) -> float:
        """This rank's share of `measure`. Raises what that does, on all ranks alike."""
        minibatches, refused = self._minibatches(plan)
        if refused:
            raise refused[0]
        return fmean(self._gradient_pass.measure(minibatch, version=self._version) for minibatch in minibatches)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs at temperature 1 of each sequence's tokens after the first, under the current weights.

        Returns:
            [num_sequences][len(sequence) - 1]

        Raises:
            TrainingError: a token id is outside the vocabulary.
            ValueError: a sequence is longer than model.max_context.
        """
        return score(self._policy, self._world, sequences, max_context=self.max_context)

    def score_published(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Score with the weights as they are published, in `model.dtype`, computed in float32 whatever that is: every
        engine comes close to these logprobs. See `score`."""
        with self._policy.as_published():
            return self.score(sequences)

    def draw(self, num_sequences: int, length: int, seed: int) -> list[list[int]]:
        """Sequences sampled from the current policy at temperature 1, after a random first token.

        One forward pass a token: meant for a few short probe sequences, not for rollouts.

        Returns:
            [num_sequences][length]
        """
        return draw(self._policy, num_sequences, length, seed)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, in `model.dtype`, whole. All ranks iterate at the same time.

        In float32 the tensors of a single rank share the trainer's memory: copy them before the next step. With tied
        embeddings there is no `lm_head.weight`.
        """
        return self._policy.named_tensors()

    def held_slices(self) -> list[tuple[str, TensorSlice]]:
        """Slices of every parameter that this rank publishes, by Hugging Face name; the ranks publish each once.

        All ranks call this at the same time. The slices have `training.master_dtype` and share the trainer's memory,
        but for what had to be gathered: copy them before the next step. `titan_rl.training.models.hf_model` tells which
        is which.
        """
        return self._policy.held_slices()

    def hold_weights(self, until: Future[Any]) -> None:
        """No step changes a weight before this is done, because another thread reads them. However it ends: an error
        is not the trainer's."""
        self._readers.add(until)

    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, version and random state, so that `load` on as many ranks continues to the bit.

        The folder appears whole or not at all; one already there is replaced.

        Raises:
            CheckpointError: it could not be written.
        """
        self.begin_save(directory)
        self.finish_save()

    def begin_save(self, directory: str | Path, files: Mapping[str, str] | None = None) -> None:
        """Begin what `save` does, and return once everything is copied; the next step may then begin.

        Args:
            files: what else the folder is to hold: name -> text.

        Raises:
            CheckpointError: a step failed after some of its minibatches, so that these weights are of no version.
        """
        if self._is_between_versions:
            raise CheckpointError(
                f"step {self._version + 1} failed after some of its minibatches: the weights are of no version, and "
                "are not saved"
            )
        self._writer.begin(Path(directory), self._model, self._optimizers.parts, self._version, files or {})

    def finish_save(self) -> None:
        """Returns once the folder begun last is whole. Other threads may call this.

        Raises:
            NoSpaceError: the disk is full.
            CheckpointError: it could not be written for another reason.
        """
        self._writer.finish()

    def load(self, directory: str | Path) -> None:
        """Continue from what `save` wrote, also on another number of ranks. Every byte is verified before.

        Raises:
            DamagedCheckpointError: its bytes are not those that were written. The trainer is as before.
            CheckpointError: there is no checkpoint, or it is of another model. The trainer may be left with part of it
                and must not be used.
        """
        self._readers.wait()
        self._version = load_train_state(Path(directory), self._model, self._optimizers.parts, self._world)
        self._is_between_versions = False

    def export_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face folder: weights, config, and the tokenizer files of the folder the model came from,
        with a chat template that keeps the reasoning which prompts of training keep.

        Raises:
            CheckpointError: it could not be written.
        """
        tensors = self.named_tensors()
        try:
            if self._world.is_first:
                source, dtype = Path(self._config.path), self._config.dtype
                template = fit_template(source, self._config.renderer).template
                layout = self._policy.layout()
                export_hf(Path(directory), layout, tensors, source=source, dtype=dtype, chat_template=template)
        finally:
            deque(tensors, maxlen=0)  # every rank hands the first one its parts, also where the disk is full
        self._world.barrier()

    def _minibatches(self, plan: StepPlan) -> tuple[list[Minibatch], list[UntrainableError]]:
        """The minibatches of a plan as tensors, and an error for each that has a sample which does not fit the model,
        on whichever rank. All ranks have the same ones."""
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
        """Why this rank cannot score a minibatch, and the rollouts that it has of it."""
        complaints = (self._policy.complaint(batch) for batch in minibatch.batches)
        return next((each for each in complaints if each is not None), None), minibatch.rollout_ids

    def _update(self, minibatch: Minibatch, proximal: dict[int, torch.Tensor], lr: float) -> _Update:
        """One optimizer step, or an error and none. Gradients take no memory before and after it."""
        try:
            with span("forward and backward", "trainer", positions=minibatch.num_positions):
                gradient = self._gradient_pass.run(minibatch, proximal, version=self._version)
            with span("waiting for the copy", f"trainer,{IDLE}"):
                waited_s = self._readers.wait()
            self._is_between_versions = True
            with span("optimizer", "trainer"):
                self._optimizers.step(lr)
        finally:
            self._optimizers.zero_grad()
        return _Update(gradient, waited_s)


def _make_policy(model: ModelConfig, training: TrainingConfig, world: World, *, is_trained: bool = True) -> Policy:
    """Build the policy, or the reference model, which is not trained.

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


def _make_optimizers(policy: Policy, training: TrainingConfig) -> Optimizers:
    spec = OptimizerSpec(
        training.lr,
        betas=training.betas,
        weight_decay=training.weight_decay,
        state_dtype=training.optimizer_dtype,
        offload=bool({"optimizer", "parameters"} & {*training.offload}),
    )
    return Optimizers(policy.model, training.optimizer, spec)


def make_planner(training: TrainingConfig) -> Callable[[Sequence[TrainingSample]], list[StepPlan]]:
    """`plan_step` with the settings of `[training]`."""
    return partial(
        plan_step,
        row_tokens=training.row_tokens,
        rows_per_micro_batch=training.rows_per_micro_batch,
        minibatches=training.minibatches,
        ranks=training.data_parallel,
        share_prompts=training.share_prompts,
    )
