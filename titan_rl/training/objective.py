"""Objective of a step: a policy loss with off-policy correction and optional terms of a KL divergence and a teacher.

It also collects per-token statistics, from which `token_metrics` computes the metrics of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from titan_rl.training.choices import Average, DistillKind
from titan_rl.training.corrections import correct, interpolated_logprobs
from titan_rl.training.divergence import ESTIMATES, divergence
from titan_rl.training.losses import MAX_LOG_RATIO, ClipRange, LossTokens, find_loss, sum_by_sequence
from titan_rl.training.parallel import World
from titan_rl.training.settings import CorrectionConfig, TrainingConfig
from titan_rl.training.tensor_batch import TensorBatch


class Objective:
    """`sum(loss_N * share_N) / denominator`, where the denominator is summed over the whole batch.

    The teacher term has its own denominator, the number of scored tokens. It is therefore multiplied by `denominator /
    scored tokens`, which `GradientPass` counts beforehand, before it is added to the other terms.

    A token with a value that is not finite contributes to neither the sum nor the denominator, and a token that a
    correction masks only to the denominator. The weights of a sample's tokens (`TrainingSample.loss_weights`) multiply
    those of the correction.

    Args:
        max_context: Divisor of the sum over a sequence if `training.average` is "constant".

    Raises:
        ConfigError: No loss is named `training.loss`.

    Example: `Objective(TrainingConfig(loss="gspo"), CorrectionConfig(weight="token"), max_context=512)`
    """

    def __init__(self, training: TrainingConfig, correction: CorrectionConfig, *, max_context: int) -> None:
        self._loss = find_loss(training.loss)
        self._clip = ClipRange(*training.clip)
        self._average: Average = training.average
        self._kl_coef = training.kl_coef
        self._kl = ESTIMATES[training.kl]
        self._correction = correction
        self._max_context = max_context
        self._distill: DistillKind = training.distill
        self._distill_coef = training.distill_coef if training.distill != "sampled" else 0.0

    @property
    def distills(self) -> bool:
        """Whether the loss has a term over a teacher's top tokens."""
        return bool(self._distill_coef)

    def counts(self, batch: TensorBatch) -> tuple[float, float]:
        """Denominator and number of scored tokens of a micro-batch, as far as they are known before the forward
        pass."""
        finite_N = torch.isfinite(batch.behaviour_logprobs_N)
        _, denominator = self._shares(
            batch.sequences_N[finite_N], batch.num_sequences, batch.behaviour_logprobs_N[finite_N]
        )
        scored = 0 if batch.teacher is None else int((batch.teacher.scored_N & finite_N).sum())
        return float(denominator), float(scored)

    @property
    def recomputes_proximal(self) -> bool:
        """Whether ratios are clipped against logprobs that the trainer computes at the start of the update."""
        return self._correction.proximal == "recomputed"

    def __call__(
        self,
        batch: TensorBatch,
        logprobs_N: torch.Tensor,
        entropies_N: torch.Tensor,
        *,
        version: int,
        proximal_logprobs_N: torch.Tensor | None = None,
        reference_logprobs_N: torch.Tensor | None = None,
        taught_logprobs_NK: torch.Tensor | None = None,
        taught_share: float = 1.0,
    ) -> tuple[torch.Tensor, TokenStats]:
        """Compute the summed loss of a micro-batch, for `backward`, and the statistics of its tokens.

        Args:
            version: Version of the weights at the start of the update.
            proximal_logprobs_N: Logprobs under the weights at the start of the update; by default, `logprobs_N`.
            reference_logprobs_N: Logprobs of the reference model, if there is one.
            taught_logprobs_NK: Policy's logprobs of the teacher's top tokens, with gradient, if there is a teacher.
            taught_share: Denominator of the whole batch divided by its number of scored tokens.
        """
        old_N = self._proximal_logprobs(batch, logprobs_N, proximal_logprobs_N, version)
        log_ratio_N = logprobs_N.detach() - batch.behaviour_logprobs_N
        valid_N = torch.isfinite(log_ratio_N) & torch.isfinite(old_N)
        if reference_logprobs_N is not None:
            valid_N &= torch.isfinite(reference_logprobs_N)
        # Non-finite values are removed before the arithmetic: zero times their gradient would still be NaN.
        at = valid_N.nonzero().squeeze(-1)
        sequences_M, num_sequences = batch.sequences_N[at], batch.num_sequences
        tokens = LossTokens(logprobs_N[at], old_N[at], batch.advantages_N[at], sequences_M, num_sequences)
        policy = self._loss(tokens, self._clip)
        correction = correct(old_N[at], batch.behaviour_logprobs_N[at], sequences_M, num_sequences, self._correction)
        # `where`, because 0 times a loss that overflows would be NaN.
        weights_M = correction.weights_N * batch.loss_weights_N[at]
        loss_M = (policy.loss_N * weights_M).where(~correction.masked_N & (weights_M > 0), 0.0)
        kl_M = torch.zeros_like(loss_M)
        if reference_logprobs_N is not None:
            kl_M = self._kl(tokens.logprobs_N, reference_logprobs_N[at])
            loss_M = loss_M + self._kl_coef * kl_M
        share_M, denominator = self._shares(sequences_M, num_sequences, loss_M)
        shared_M = loss_M * share_M
        taught_M = torch.full_like(loss_M, torch.nan)
        if taught_logprobs_NK is not None and batch.teacher is not None:
            scored_M = batch.teacher.scored_N[at] & torch.isfinite(taught_logprobs_NK.detach()).all(-1)[at]
            # Unscored tokens are removed before the arithmetic, because their gradient would be NaN.
            positions = scored_M.nonzero().squeeze(-1)
            kl_S = divergence(
                self._distill, taught_logprobs_NK[at[positions]], batch.teacher.logprobs_NK[at[positions]]
            )
            taught_M = taught_M.index_copy(0, positions, kl_S.detach())
            added_S = self._distill_coef * taught_share * kl_S * weights_M[positions]
            shared_M = shared_M.index_add(0, positions, added_S.where(~correction.masked_N[positions], 0.0))
        summed = shared_M.sum()
        stats = TokenStats(
            valid_N=valid_N,
            loss_M=shared_M.detach(),
            log_ratio_M=log_ratio_N[at],
            clipped_M=policy.clipped_N & ~correction.masked_N,
            weight_M=correction.weights_N,
            masked_M=correction.masked_N,
            kl_M=kl_M.detach(),
            taught_M=taught_M,
            entropy_M=entropies_N.detach()[at],
            version_M=batch.versions_N[at],
            oldest_version_M=batch.oldest_versions_N[at],
            denominator=denominator.reshape(1),
        )
        return summed, stats

    def _proximal_logprobs(
        self, batch: TensorBatch, logprobs_N: torch.Tensor, at_start_N: torch.Tensor | None, version: int
    ) -> torch.Tensor:
        match self._correction.proximal:
            case "behaviour":
                return batch.behaviour_logprobs_N
            case "recomputed":
                return logprobs_N.detach() if at_start_N is None else at_start_N
            case "interpolated":
                return interpolated_logprobs(logprobs_N, batch.behaviour_logprobs_N, batch.versions_N, version)

    def _shares(
        self, sequences_M: torch.Tensor, num_sequences: int, like_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Share of each token in the sum, and the denominator of this micro-batch."""
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


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Statistics of the trained tokens of a batch, detached. M of N tokens are finite and count."""

    valid_N: torch.Tensor  # bool
    loss_M: torch.Tensor  # each token's part of the sum
    log_ratio_M: torch.Tensor  # log(policy / behaviour)
    clipped_M: torch.Tensor  # bool
    weight_M: torch.Tensor  # weight of the off-policy correction
    masked_M: torch.Tensor  # bool, by the off-policy correction
    kl_M: torch.Tensor  # KL estimate to the reference model
    taught_M: torch.Tensor  # divergence from the teacher; NaN where there is none
    entropy_M: torch.Tensor
    version_M: torch.Tensor
    oldest_version_M: torch.Tensor
    denominator: torch.Tensor  # [number of micro-batches]

    @staticmethod
    def concatenate(by_batch: Sequence[TokenStats]) -> TokenStats:
        """Join the statistics of one batch or more."""
        columns = {field.name: [getattr(stats, field.name) for stats in by_batch] for field in fields(TokenStats)}
        return TokenStats(**{name: torch.cat(column) for name, column in columns.items()})


def token_metrics(stats: TokenStats, version: int, world: World | None = None) -> dict[str, float]:
    """Compute the metrics over the finite tokens of all ranks. There must be at least one such token.

    Args:
        version: Version of the weights at the start of the step.

    Returns:
        ratio_mean, ratio_max: Ratio of policy to behaviour probability.
        clip_fraction: Share of tokens whose ratio was bounded.
        entropy: Mean entropy of the distribution from which each token was drawn, in nats.
        approx_kl: Mean of ratio - 1 - log(ratio), the k3 estimate (Schulman, 2020) of KL(behaviour || policy), in nats.
        reference_kl: Mean estimate of the KL to the reference model; 0 without one.
        teacher_kl: Mean divergence from the teacher over its top tokens. Absent without a teacher.
        staleness_mean, staleness_max: Optimizer steps between the weights that sampled a token and `version`.
        num_tokens: Number of finite tokens.
        num_nonfinite_tokens: Number of tokens left out because one of their logprobs is not finite.
        correction_weight_mean, correction_weight_max: Weight of the off-policy correction; masked tokens count as 0.
        correction_masked_fraction: Share of tokens that the off-policy correction masks.
        on_policy_logprob_diff_mean, on_policy_logprob_diff_max: Absolute difference between the trainer's and the
            generator's logprob of the same token under the same weights. Only samples whose tokens all have this
            version count: later tokens of other samples were sampled with keys and values of older weights. Absent
            without such samples.
    """
    world = world or World()
    log_ratio_M = stats.log_ratio_M.double()
    clamped_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_M = clamped_M.exp()
    staleness_M = (version - stats.version_M).double()
    taught_M = stats.taught_M[stats.taught_M.isfinite()]
    on_policy_M = log_ratio_M[stats.oldest_version_M == version].abs()
    means = {
        "ratio_mean": ratio_M,
        "clip_fraction": stats.clipped_M,
        "entropy": stats.entropy_M,
        "approx_kl": ratio_M - 1 - clamped_M,
        "reference_kl": stats.kl_M,
        "teacher_kl": taught_M,
        "staleness_mean": staleness_M,
        "correction_weight_mean": stats.weight_M,
        "correction_masked_fraction": stats.masked_M,
        "on_policy_logprob_diff_mean": on_policy_M,
    }
    greatest = {
        "ratio_max": ratio_M,
        "staleness_max": staleness_M,
        "correction_weight_max": stats.weight_M,
        "on_policy_logprob_diff_max": on_policy_M,
    }
    num_tokens, num_on_policy, num_taught, num_nonfinite, *sums = world.sum(
        [log_ratio_M.numel(), on_policy_M.numel(), taught_M.numel(), float((~stats.valid_N).sum())]
        + [float(values_M.double().sum()) for values_M in means.values()]
    )
    maxes = world.max([float(values_M.max()) if values_M.numel() else 0.0 for values_M in greatest.values()])
    counts = dict.fromkeys(means, num_tokens)
    counts |= {"on_policy_logprob_diff_mean": num_on_policy, "teacher_kl": num_taught}
    metrics = {name: total / counts[name] for name, total in zip(means, sums, strict=True) if counts[name]}
    metrics |= dict(zip(greatest, maxes, strict=True))
    if not num_on_policy:
        del metrics["on_policy_logprob_diff_max"]
    return metrics | {"num_tokens": num_tokens, "num_nonfinite_tokens": num_nonfinite}
