"""The trainer of one policy: torchtitan's model, AdamW, one optimizer step for each batch of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from titan_rl.config.sections import ModelConfig, TrainingConfig
from titan_rl.errors import TrainingError
from titan_rl.training.batch import Batch, make_batch
from titan_rl.training.device import local_device
from titan_rl.training.hf_export import export_hf
from titan_rl.training.losses import grpo_loss, selected_logprobs
from titan_rl.training.metrics import TokenRecord, token_metrics
from titan_rl.training.model import (
    build_model,
    hf_named_tensors,
    load_weights,
    model_config_from_hf,
    read_hf_config,
)
from titan_rl.training.packer import pack
from titan_rl.training.sample import TrainingSample
from titan_rl.training.schedule import learning_rate
from titan_rl.training.train_state import load_train_state, save_train_state


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did.

    `metrics` holds loss, grad_norm, lr, num_tokens (trained), num_samples, num_dropped_samples (longer than a row),
    padding_fraction, and what `titan_rl.training.metrics.token_metrics` documents.
    """

    version: int  # of the weights after the step
    metrics: dict[str, float]


class TrainerCore:
    """Trains one policy in this process. A plain class: an actor only wraps it. Not thread-safe.

    Weights and optimizer state are float32. With `dtype = "bfloat16"` the forward pass runs in bfloat16, and
    published and exported weights are bfloat16.

    Args:
        seed: of torch's random state; the same seed, weights and samples give the same bits on one machine.

    Raises:
        ModelError: the folder lacks a file, or its config and weights do not fit together.

    Example:

        trainer = TrainerCore(ModelConfig(path="models/tiny"), TrainingConfig(steps=10), seed=0)
        result = trainer.step(build_samples(group, temperature=1.0))
        result.version  # 1
    """

    def __init__(self, model_config: ModelConfig, training: TrainingConfig, *, seed: int) -> None:
        torch.manual_seed(seed)
        self._config = model_config
        self._training = training
        self._device = local_device()
        self._dtype: torch.dtype = getattr(torch, model_config.dtype)
        self._folder = Path(model_config.path)
        longest = max(model_config.max_context, training.row_tokens)
        hf_config = read_hf_config(self._folder)
        self._model = build_model(model_config_from_hf(hf_config, max_context=longest), self._device)
        load_weights(self._model, self._folder)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=training.lr,
            betas=training.betas,
            weight_decay=training.weight_decay,
            fused=True,
        )
        self._version = 0

    @property
    def version(self) -> int:
        """The policy version of the current weights: 0 as loaded, one more after each step."""
        return self._version

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.config.vocab_size

    def step(self, samples: Sequence[TrainingSample]) -> StepResult:
        """One optimizer step over all samples, in as many micro-batches as they need.

        The loss is averaged over every trained token of the whole batch, so the split does not change the step.

        Raises:
            TrainingError: no token is left to train on, a token id is outside the vocabulary, or loss or gradient is
                not finite. Weights, optimizer state and version are unchanged.
        """
        packing = pack(samples, self._training.row_tokens)
        size = self._training.rows_per_micro_batch
        records: list[TokenRecord] = []
        num_padding = num_positions = 0
        self._optimizer.zero_grad()
        for start in range(0, len(packing.rows), size):
            batch = make_batch(packing.rows[start : start + size], self._device)
            num_padding += batch.num_padding
            num_positions += batch.token_ids_BL.numel()
            if batch.num_trained:
                records.append(self._accumulate_gradients(batch))
        record = TokenRecord.concatenate(records) if records else None
        num_tokens = int(record.valid_N.sum()) if record else 0
        if record is None or not num_tokens:
            raise TrainingError(
                f"none of {len(samples)} samples has a token to train on: {len(packing.dropped)} are longer than "
                f"training.row_tokens ({self._training.row_tokens}), the others have no finite behaviour logprob"
            )
        loss = float(record.loss_N.sum()) / num_tokens
        grad_norm = self._average_and_clip_gradients(num_tokens)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self._optimizer.zero_grad()
            raise TrainingError(
                f"step {self._version + 1} has loss {loss} and gradient norm {grad_norm}; the weights are unchanged"
            )
        lr = learning_rate(self._version, self._training)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "num_tokens": float(num_tokens),
            "num_samples": float(len(samples) - len(packing.dropped)),
            "num_dropped_samples": float(len(packing.dropped)),
            "padding_fraction": num_padding / num_positions,
            **token_metrics(record, self._version),
        }
        self._version += 1
        return StepResult(self._version, metrics)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs at temperature 1 of each sequence's tokens after the first, under the current weights.

        Returns:
            [num_sequences][len(sequence) - 1]

        Raises:
            TrainingError: a token id is outside the vocabulary.
            ValueError: a sequence is longer than model.max_context.
        """
        row: list[TrainingSample] = []
        for sequence in sequences:
            length = len(sequence)
            if length > self._config.max_context:
                raise ValueError(f"a sequence has {length} tokens; model.max_context is {self._config.max_context}")
            if length > 1:
                blank, versions = [0.0] * length, [self._version] * length
                row.append(TrainingSample("", "", sequence, [True] * length, blank, blank, versions, temperature=1.0))
        if not row:
            return [[] for _ in sequences]
        with torch.no_grad():
            logprobs_N, _ = self._logprobs(make_batch([row], self._device))
        logprobs = iter(logprobs_N.tolist())
        return [list(islice(logprobs, max(len(sequence) - 1, 0))) for sequence in sequences]

    @torch.no_grad()
    def draw(self, num_sequences: int, length: int, seed: int) -> list[list[int]]:
        """Sequences sampled from the current policy at temperature 1, after a random first token.

        One forward pass a token: meant for a few short probe sequences, not for rollouts.

        Returns:
            [num_sequences][length]
        """
        generator = torch.Generator().manual_seed(seed)
        sequences = torch.randint(self.vocab_size, (num_sequences, 1), generator=generator).tolist()
        blank = [0.0] * length
        for size in range(1, length):
            # The token to be drawn is the only one asked for; what stands in its place is not seen by its predictor.
            mask = [False] * size + [True]
            rows = [
                [TrainingSample("", "", [*ids, 0], mask, blank, blank, [self._version] * length, temperature=1.0)]
                for ids in sequences
            ]
            probs_NV = self._logits(make_batch(rows, self._device)).float().softmax(-1).cpu()
            for ids, token in zip(sequences, torch.multinomial(probs_NV, 1, generator=generator), strict=True):
                ids.append(int(token))
        return sequences

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, in `model.dtype`.

        In float32 the tensors share the trainer's memory: copy them before the next step. With tied embeddings there
        is no `lm_head.weight`.
        """
        for name, tensor in hf_named_tensors(self._model):
            yield name, tensor.to(self._dtype)

    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, version and random state, so that `load` continues to the bit.

        The folder appears whole or not at all; one already there is replaced.

        Raises:
            CheckpointError: it could not be written.
        """
        save_train_state(Path(directory), self._model, self._optimizer, self._version)

    def load(self, directory: str | Path) -> None:
        """Continue from what `save` wrote.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it is of another model. The trainer may be left
                with part of it and must not be used.
        """
        self._version = load_train_state(Path(directory), self._model, self._optimizer)

    def export_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face folder: weights, config, and the tokenizer files of the folder the model came from.

        Raises:
            CheckpointError: it could not be written.
        """
        export_hf(Path(directory), self.named_tensors(), source=self._folder, dtype=self._config.dtype)

    def _accumulate_gradients(self, batch: Batch) -> TokenRecord:
        """Add the gradient of the batch's summed loss. The sum is divided once the whole batch's tokens are known."""
        logprobs_N, entropies_N = self._logprobs(batch)
        loss = grpo_loss(
            logprobs_N,
            batch.behaviour_logprobs_N,
            batch.advantages_N,
            clip_low=self._training.clip_low,
            clip_high=self._training.clip_high,
        )
        loss.loss_N.sum().backward()
        return TokenRecord(
            loss_N=loss.loss_N.detach(),
            valid_N=loss.valid_N,
            log_ratio_N=loss.log_ratio_N,
            clipped_N=loss.clipped_N,
            entropy_N=entropies_N.detach(),
            version_N=batch.versions_N,
            oldest_version_N=batch.oldest_versions_N,
        )

    def _average_and_clip_gradients(self, num_tokens: int) -> float:
        """Turn summed gradients into clipped mean gradients. Returns the norm of the mean before clipping."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_div_(gradients, float(num_tokens))
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, self._training.max_grad_norm))

    def _logprobs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprobs and entropies of the trained tokens at their temperatures.  # [N], [N]"""
        return selected_logprobs(self._logits(batch), batch.targets_N, batch.temperatures_N)

    def _logits(self, batch: Batch) -> torch.Tensor:
        """What the model predicts in place of each trained token.  # [N, V]"""
        vocab_size = self._model.config.vocab_size
        if not 0 <= int(batch.token_ids_BL.min()) <= int(batch.token_ids_BL.max()) < vocab_size:
            raise TrainingError(
                f"a sample has token id {int(batch.token_ids_BL.max())}; the vocabulary is {vocab_size}"
            )
        autocast = self._dtype is not torch.float32
        with torch.autocast(self._device.type, self._dtype) if autocast else nullcontext():
            hidden_BLD = self._model(batch.token_ids_BL, batch.positions_BL, batch.layout)
            return self._model.lm_head(hidden_BLD.flatten(0, 1).index_select(0, batch.predictors_N))
