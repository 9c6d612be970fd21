"""What a step's trained tokens say about the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from titan_rl.training.losses.types import MAX_LOG_RATIO
from titan_rl.training.parallel.world import World


@dataclass(frozen=True, slots=True)
class TokenStats:
    """The trained tokens of a batch, detached. Of N tokens, M are finite and count."""

    valid_N: torch.Tensor  # bool
    loss_M: torch.Tensor  # each token's part of the sum
    log_ratio_M: torch.Tensor  # log(policy / behaviour)
    clipped_M: torch.Tensor  # bool
    weight_M: torch.Tensor  # of the off-policy correction
    masked_M: torch.Tensor  # bool, by the off-policy correction
    kl_M: torch.Tensor  # to the reference model
    entropy_M: torch.Tensor
    version_M: torch.Tensor
    oldest_version_M: torch.Tensor
    denominator: torch.Tensor  # [number of micro-batches], what the sum is divided by

    @staticmethod
    def concatenate(by_batch: Sequence[TokenStats]) -> TokenStats:
        """The tokens of all of them, of which there is at least one."""
        columns = {field.name: [getattr(stats, field.name) for stats in by_batch] for field in fields(TokenStats)}
        return TokenStats(**{name: torch.cat(column) for name, column in columns.items()})


def token_metrics(stats: TokenStats, version: int, world: World | None = None) -> dict[str, float]:
    """Metrics over the tokens of all ranks that count, of which there is at least one.

    Args:
        version: of the weights at the start of the step.

    Returns:
        ratio_mean, ratio_max: of policy to behaviour probability.
        clip_fraction: share of tokens whose ratio was bounded.
        entropy: mean, in nats, of the distribution each token was drawn from.
        approx_kl: mean of ratio - 1 - log(ratio), the k3 estimate (Schulman, 2020) of KL(behaviour || policy).
        reference_kl: mean estimate of the KL to the reference model; 0 without one.
        staleness_mean, staleness_max: optimizer steps between the weights that sampled a token and `version`.
        num_tokens: tokens that count.
        num_nonfinite_tokens: tokens left out because one of their logprobs is not finite.
        correction_weight_mean, correction_weight_max: of the off-policy correction, masked tokens included as 0.
        correction_masked_fraction: share of tokens that it masks.
        on_policy_logprob_diff_mean, on_policy_logprob_diff_max: absolute difference between the trainer's and the
            generator's logprob of the same token under the same weights. Of samples that are wholly of this version:
            the later tokens of others were sampled with keys and values of older weights. Absent if there is none.
    """
    world = world or World()
    log_ratio_M = stats.log_ratio_M.double()
    clamped_M = log_ratio_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_M = clamped_M.exp()
    staleness_M = (version - stats.version_M).double()
    on_policy_M = log_ratio_M[stats.oldest_version_M == version].abs()
    means = {
        "ratio_mean": ratio_M,
        "clip_fraction": stats.clipped_M,
        "entropy": stats.entropy_M,
        "approx_kl": ratio_M - 1 - clamped_M,
        "reference_kl": stats.kl_M,
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
    num_tokens, num_on_policy, num_nonfinite, *sums = world.sum(
        [log_ratio_M.numel(), on_policy_M.numel(), float((~stats.valid_N).sum())]
        + [float(values_M.double().sum()) for values_M in means.values()]
    )
    maxes = world.max([float(values_M.max()) if values_M.numel() else 0.0 for values_M in greatest.values()])
    counts = dict.fromkeys(means, num_tokens) | {"on_policy_logprob_diff_mean": num_on_policy}
    metrics = {name: total / counts[name] for name, total in zip(means, sums, strict=True) if counts[name]}
    metrics |= dict(zip(greatest, maxes, strict=True))
    if not num_on_policy:
        del metrics["on_policy_logprob_diff_max"]
    return metrics | {"num_tokens": num_tokens, "num_nonfinite_tokens": num_nonfinite}
