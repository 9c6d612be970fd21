"""Off-policy corrections: weights and masks of tokens that a policy other than the learning one sampled.

    rho_t = pi_prox(t) / pi_behaviour(t)

weighs or masks the loss of each token. pi_behaviour is the generator's distribution under the weights that sampled the
token. With hot swaps, the tokens of a sequence are sampled by different weights, so everything here is computed for
each token. pi_prox is the policy that ratios are clipped against:

    behaviour      pi_prox = pi_behaviour: no correction beyond the clip ("bypass")
    recomputed     the policy at the start of the update, by a forward pass of the trainer
    interpolated   log pi_prox = log pi_b + alpha (log pi_theta - log pi_b), without a forward pass (AReaL), where
                   alpha = clamp((v_prox - v_b) / (v_theta - v_b), 0, 1) and v_b is the token's version

Weights, with a cap C (without one, C is infinity):

    token          min(rho_t, C)                     truncated importance sampling (Ionides, 2008; Yao et al., 2025)
    sequence       min(prod_t rho_t, C)              the same for a whole sequence

Masks keep these tokens. Logarithms are compared up to their rounding, so that a value at a bound is kept:

    token          rho_t in [low, high]              IcePop (Ring-1T, arXiv:2510.18855) with token weights without a cap
    sequence       prod_t rho_t in [low, high]       masked importance sampling
    geometric      (prod_t rho_t)^(1/T) in [low, high]
    veto           no token of the sequence has rho_t below the veto

Decoupled PPO (Hilton et al., 2021, arXiv:2110.00641, eq. 2; AReaL, arXiv:2505.24298, eq. 5) is a recomputed or
interpolated pi_prox with token weights. Masked tokens stay in the denominator of the loss: a mask must not raise the
weight of the other tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from titan_rl.training.losses import MAX_LOG_RATIO, mean_by_sequence, sum_by_sequence
from titan_rl.training.settings import CorrectionConfig

ROUNDING = 1e-5
"""Rounding of logprobs in float32, where exp(log(0.1)) < 0.1. A log-ratio this far beyond a bound still counts as
within it."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors of the tokens' losses. They carry no gradient.  # all [N]"""

    weights_N: torch.Tensor  # 0 where masked
    masked_N: torch.Tensor  # bool


def interpolated_logprobs(
    logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, versions_N: torch.Tensor, version: int
) -> torch.Tensor:
    """Interpolate log pi_prox between the behaviour policy and the current one, by the age of each token.  # [N]

    The update goes from `version` (v_prox) to the one after it (v_theta). For a token of `version` itself the result is
    its behaviour logprob, and for an old token nearly the current policy's logprob.

    Args:
        versions_N: Version of the weights that sampled each token, at most `version`.
    """
    age_N = (version - versions_N).clamp(min=0).to(logprobs_N.dtype)
    return torch.lerp(behaviour_logprobs_N, logprobs_N.detach(), age_N / (age_N + 1))


def correct(
    proximal_logprobs_N: torch.Tensor,
    behaviour_logprobs_N: torch.Tensor,
    sequences_N: torch.Tensor,
    num_sequences: int,
    config: CorrectionConfig,
) -> Correction:
    """Compute the weights and masks of tokens whose logprobs are finite. Log-ratios of tokens and of whole sequences
    are clamped to +-20."""
    with torch.no_grad():
        log_rho_N = _clamp(proximal_logprobs_N - behaviour_logprobs_N)
        log_product_N = _clamp(sum_by_sequence(log_rho_N, sequences_N, num_sequences))[sequences_N]

        match config.weight:
            case "token":
                weights_N = log_rho_N.exp()
            case "sequence":
                weights_N = log_product_N.exp()
            case "none":
                weights_N = torch.ones_like(log_rho_N)
        if config.cap is not None:
            weights_N = weights_N.clamp(max=config.cap)

        kept_N = torch.ones_like(log_rho_N, dtype=torch.bool)
        if config.mask != "none":
            low, high = config.bounds
            measured = {
                "token": log_rho_N,
                "sequence": log_product_N,
                "geometric": mean_by_sequence(log_rho_N, sequences_N, num_sequences),
            }
            log_measured_N = measured[config.mask]
            kept_N &= (log_measured_N >= math.log(low) - ROUNDING) & (log_measured_N <= math.log(high) + ROUNDING)
        if config.veto is not None:
            vetoes_N = (log_rho_N < math.log(config.veto) - ROUNDING).to(log_rho_N.dtype)
            kept_N &= sum_by_sequence(vetoes_N, sequences_N, num_sequences)[sequences_N] == 0
    return Correction(weights_N.where(kept_N, 0.0), ~kept_N)


def _clamp(log_ratios: torch.Tensor) -> torch.Tensor:
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
