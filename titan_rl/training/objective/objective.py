"""What a step minimizes: a policy loss, corrected for who sampled the tokens, and a KL term on request."""

from __future__ import annotations

import torch

from titan_rl.calls.imports import find_function
from titan_rl.training.losses import BY_NAME, ClipRange, LossTokens, kl
from titan_rl.training.losses.types import sum_by_sequence
from titan_rl.training.objective.corrections import correct, interpolated_logprobs
from titan_rl.training.objective.metrics import TokenStats
from titan_rl.training.policy.tensor_batch import TensorBatch
from titan_rl.training.settings import CorrectionConfig, TrainingConfig


class Objective:
    """`sum(loss_N * share_N) / denominator`, where the denominator is summed over the whole batch.

    A token with a value that is not finite is in neither; one that a correction masks is in the denominator alone.

    Raises:
        ConfigError: there is no such `training.loss`.
    """

    def __init__(self, training: TrainingConfig, correction: CorrectionConfig, max_context: int) -> None:
        self.correction = correction
        self._training = training
        self._max_context = max_context
        self._policy_loss = find_function("training.loss", training.loss, BY_NAME)
        self._clip = ClipRange(training.clip_low, training.clip_high)

    def __call__(
        self,
        batch: TensorBatch,
        logprobs_N: torch.Tensor,
        entropies_N: torch.Tensor,
        *,
        version: int,
        proximal_logprobs_N: torch.Tensor | None = None,
        reference_logprobs_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, TokenStats]:
        """The summed loss of a micro-batch, for `backward`, and what is to be said of its tokens.

        Args:
            version: of the weights at the start of the update.
            proximal_logprobs_N: under those weights; by default `logprobs_N` is.
            reference_logprobs_N: of the reference model, where `training.kl_coef` is not 0.
        """
        old_N = self._proximal(batch, logprobs_N, proximal_logprobs_N, version)
        log_ratio_N = logprobs_N.detach() - batch.behaviour_logprobs_N
        valid_N = torch.isfinite(log_ratio_N) & torch.isfinite(old_N)
        if reference_logprobs_N is not None:
            valid_N &= torch.isfinite(reference_logprobs_N)
        # A value that is not finite must leave before the arithmetic: zero times its gradient would still be NaN.
        at = valid_N.nonzero().squeeze(-1)
        sequences_M, num_sequences = batch.sequences_N[at], batch.num_sequences
        tokens = LossTokens(logprobs_N[at], old_N[at], batch.advantages_N[at], sequences_M, num_sequences)
        policy = self._policy_loss(tokens, self._clip)
        correction = correct(old_N[at], batch.behaviour_logprobs_N[at], sequences_M, num_sequences, self.correction)
        # Multiplying by 0 would leave NaN where the loss of a masked token overflows.
        loss_M = (policy.loss_N * correction.weights_N).where(~correction.masked_N, 0.0)
        kl_M = torch.zeros_like(loss_M)
        if reference_logprobs_N is not None:
            kl_M = kl.BY_NAME[self._training.kl](tokens.logprobs_N, reference_logprobs_N[at])
            loss_M = loss_M + self._training.kl_coef * kl_M
        share_M, denominator = self._average(sequences_M, num_sequences, loss_M)
        summed = (loss_M * share_M).sum()
        stats = TokenStats(
            valid_N=valid_N,
            loss_M=(loss_M * share_M).detach(),
            log_ratio_M=log_ratio_N[at],
            clipped_M=policy.clipped_N & ~correction.masked_N,
            weight_M=correction.weights_N,
            masked_M=correction.masked_N,
            kl_M=kl_M.detach(),
            entropy_M=entropies_N.detach()[at],
            version_M=batch.versions_N[at],
            oldest_version_M=batch.oldest_versions_N[at],
            denominator=denominator.reshape(1),
        )
        return summed, stats

    def _proximal(
        self, batch: TensorBatch, logprobs_N: torch.Tensor, at_start_N: torch.Tensor | None, version: int
    ) -> torch.Tensor:
        match self.correction.proximal:
            case "behaviour":
                return batch.behaviour_logprobs_N
            case "recomputed":
                return logprobs_N.detach() if at_start_N is None else at_start_N
            case "interpolated":
                return interpolated_logprobs(logprobs_N, batch.behaviour_logprobs_N, batch.versions_N, version)

    def _average(
        self, sequences_M: torch.Tensor, num_sequences: int, like_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's share of the sum, and what this micro-batch adds to the denominator."""
        ones_M = torch.ones_like(like_M)
        counts_S = sum_by_sequence(ones_M, sequences_M, num_sequences)
        num_present = (counts_S > 0).sum().to(like_M.dtype)
        match self._training.average:
            case "token":
                return ones_M, ones_M.sum()
            case "sequence":
                return 1 / counts_S[sequences_M], num_present
            case "constant":
                return ones_M, num_present * self._max_context
