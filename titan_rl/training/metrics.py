"""What a step's trained tokens say about the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from titan_rl.training.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """The trained tokens of a batch, detached.  # all [N]"""

    loss_N: torch.Tensor
    valid_N: torch.Tensor
    log_ratio_N: torch.Tensor
    clipped_N: torch.Tensor
    entropy_N: torch.Tensor
    version_N: torch.Tensor
    oldest_version_N: torch.Tensor

    @staticmethod
    def concatenate(records: Sequence[TokenRecord]) -> TokenRecord:
        """One record of all of them."""
        columns = {field.name: [getattr(record, field.name) for record in records] for field in fields(TokenRecord)}
        return TokenRecord(**{name: torch.cat(column) for name, column in columns.items()})


def token_metrics(record: TokenRecord, version: int) -> dict[str, float]:
    """Metrics over the valid tokens, of which there is at least one.

    Args:
        version: of the weights that computed the record.

    Returns:
        ratio_mean, ratio_max: of policy to behaviour probability.
        clip_fraction: share of tokens without a gradient because they are clipped.
        entropy: mean, in nats, of the distribution each token was drawn from.
        approx_kl: mean of ratio - 1 - log(ratio), the k3 estimate (Schulman, 2020) of KL(behaviour || policy).
        staleness_mean, staleness_max: optimizer steps between the weights that sampled a token and `version`.
        num_nonfinite_tokens: tokens left out because their behaviour logprob or ratio is not finite.
        on_policy_logprob_diff_mean, on_policy_logprob_diff_max: absolute difference between the trainer's and the
            generator's logprob of the same token under the same weights. Of samples that are wholly of this version:
            the later tokens of others were sampled with keys and values of older weights. Absent if there is none.
    """
    valid_N = record.valid_N
    log_ratio_N = record.log_ratio_N[valid_N].double()
    clamped_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = clamped_N.exp()
    staleness_N = (version - record.version_N[valid_N]).double()
    metrics = {
        "ratio_mean": ratio_N.mean(),
        "ratio_max": ratio_N.max(),
        "clip_fraction": record.clipped_N[valid_N].double().mean(),
        "entropy": record.entropy_N[valid_N].double().mean(),
        "approx_kl": (ratio_N - 1 - clamped_N).mean(),
        "staleness_mean": staleness_N.mean(),
        "staleness_max": staleness_N.max(),
        "num_nonfinite_tokens": (~valid_N).sum(),
    }
    on_policy_N = log_ratio_N[record.oldest_version_N[valid_N] == version].abs()
    if on_policy_N.numel():
        metrics["on_policy_logprob_diff_mean"] = on_policy_N.mean()
        metrics["on_policy_logprob_diff_max"] = on_policy_N.max()
    return {name: float(value) for name, value in metrics.items()}
