"""What a step minimizes: a policy loss, corrected for who sampled the tokens, and a KL term on request."""

from __future__ import annotations

from collections.abc import Callable

import torch

from titan_rl.training.choices import Average, Proximal
from titan_rl.training.losses import ClipRange, LossFn, LossTokens
from titan_rl.training.losses.kl import KLFn, k3
from titan_rl.training.losses.types import sum_by_sequence
from titan_rl.training.objective.corrections import Correction, correct, interpolated_logprobs
from titan_rl.training.objective.token_stats import TokenStats
from titan_rl.training.policy.tensor_batch import TensorBatch

CorrectFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Correction]
"""`correct`, with what it is to do."""


class Objective:
    """`sum(loss_N * share_N) / denominator`, where the denominator is summed over the whole batch.

    A token with a value that is not finite is in neither; one that a correction masks is in the denominator alone. The
    weights of a sample's tokens (`TrainingSample.loss_weights`) multiply those of the correction.

    Args:
        clip: of the ratios, as the loss understands it.
        average: "constant" divides the sum over a sequence by `max_context`.
        proximal: what ratios are clipped against; see `titan_rl.training.objective.corrections`.
        kl_coef: of the KL to a reference model.

    Example: `Objective(grpo_loss, ClipRange(0.2, 0.28), max_context=512, correct=partial(correct, weight="token"))`
    """

    def __init__(
        self,
        loss: LossFn,
        clip: ClipRange,
        *,
        max_context: int,
        average: Average = "token",
        proximal: Proximal = "behaviour",
        correct: CorrectFn = correct,
        kl_coef: float = 0.0,
        kl: KLFn = k3,
    ) -> None:
        self._loss = loss
        self._clip = clip
        self._max_context = max_context
        self._average: Average = average
        self.proximal: Proximal = proximal
        self._correct = correct
        self._kl_coef = kl_coef
        self._kl = kl

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
            reference_logprobs_N: of the reference model, where there is one.
        """
        old_N = self._proximal_logprobs(batch, logprobs_N, proximal_logprobs_N, version)
        log_ratio_N = logprobs_N.detach() - batch.behaviour_logprobs_N
        valid_N = torch.isfinite(log_ratio_N) & torch.isfinite(old_N)
        if reference_logprobs_N is not None:
            valid_N &= torch.isfinite(reference_logprobs_N)
        # A value that is not finite must leave before the arithmetic: zero times its gradient would still be NaN.
        at = valid_N.nonzero().squeeze(-1)
        sequences_M, num_sequences = batch.sequences_N[at], batch.num_sequences
        tokens = LossTokens(logprobs_N[at], old_N[at], batch.advantages_N[at], sequences_M, num_sequences)
        policy = self._loss(tokens, self._clip)
        correction = self._correct(old_N[at], batch.behaviour_logprobs_N[at], sequences_M, num_sequences)
        # Multiplying by 0 would leave NaN where the loss of a masked token overflows.
        weights_M = correction.weights_N * batch.loss_weights_N[at]
        loss_M = (policy.loss_N * weights_M).where(~correction.masked_N & (weights_M > 0), 0.0)
        kl_M = torch.zeros_like(loss_M)
        if reference_logprobs_N is not None:
            kl_M = self._kl(tokens.logprobs_N, reference_logprobs_N[at])
            loss_M = loss_M + self._kl_coef * kl_M
        share_M, denominator = self._shares(sequences_M, num_sequences, loss_M)
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

    def _proximal_logprobs(
        self, batch: TensorBatch, logprobs_N: torch.Tensor, at_start_N: torch.Tensor | None, version: int
    ) -> torch.Tensor:
        match self.proximal:
            case "behaviour":
                return batch.behaviour_logprobs_N
            case "recomputed":
                return logprobs_N.detach() if at_start_N is None else at_start_N
            case "interpolated":
                return interpolated_logprobs(logprobs_N, batch.behaviour_logprobs_N, batch.versions_N, version)

    def _shares(
        self, sequences_M: torch.Tensor, num_sequences: int, like_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's share of the sum, and what this micro-batch adds to the denominator."""
        ones_M = torch.ones_like(like_M)
        counts_S = sum_by_sequence(ones_M, sequences_M, num_sequences)
        num_present = (counts_S > 0).sum().to(like_M.dtype)
        match self._average:
            case "token":
                return ones_M, ones_M.sum()
            case "sequence":
                return 1 / counts_S[sequences_M], num_present
            case "constant":
                return ones_M, num_present * self._max_context
