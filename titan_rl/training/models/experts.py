"""A mixture of experts that computes in the precision of its input, and whose routing can be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.training.decoder_interface import FREE
from titan_rl.training.parallel import local

# isort: split
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter

_ALIGNMENT = 16
"""Alignment that torch's grouped kernel needs: matrix rows must have a multiple of this many bytes."""


class Experts(GroupedExperts):
    """Experts that compute in the dtype of their input, as the sampling engine does. torchtitan's own cast to
    bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Apply the experts.

        Args:
            x_RD: Hidden states of the routed tokens, sorted by expert.
            num_tokens_per_expert_E: Number of these tokens for each expert.
        """
        w1_EFD, w2_EDF, w3_EFD = map(local, (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        apply = partial(grouped_linear, num_tokens_E=num_tokens_per_expert_E)
        hidden_RF = F.silu(apply(x_RD, w1_EFD)) * apply(x_RD, w3_EFD)
        return apply(hidden_RF, w2_EDF).type_as(x_RD)


def grouped_linear(x_RI: torch.Tensor, weight_EOI: torch.Tensor, num_tokens_E: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix, in autocast's dtype if autocast is on.

    The gradient of the stack of matrices is computed once. Indexing the stack for each expert would compute a gradient
    of the whole stack for each of them, which is quadratic in the number of experts.

    Args:
        x_RI: Input rows, sorted by expert.
        num_tokens_E: Number of rows of each expert.

    Returns:
        Output rows in the same order.  # [R, O]
    """
    if torch.is_autocast_enabled(x_RI.device.type):
        x_RI = x_RI.to(torch.get_autocast_dtype(x_RI.device.type))
    weight_EOI = weight_EOI.to(x_RI.dtype)
    if not len(x_RI) or any(size * x_RI.itemsize % _ALIGNMENT for size in weight_EOI.shape[1:]):
        rows = x_RI.split(num_tokens_E.tolist())
        return torch.cat([F.linear(x, weight) for x, weight in zip(rows, weight_EOI.unbind(), strict=True)])
    ends_E = num_tokens_E.cumsum(0, dtype=torch.int32)
    out_RO = F.grouped_mm(x_RI.contiguous(), weight_EOI.transpose(-2, -1), offs=ends_E)
    if out_RO.requires_grad:
        out_RO.register_hook(torch.Tensor.contiguous)  # the kernel's backward pass does not accept a view as gradient
    return out_RO


class Router(TokenChoiceTopKRouter):
    """Top-k routing, except for tokens whose experts are given: router replay (R3, arXiv:2510.11370).

    The generator's choice of experts is used with the trainer's own expert weights, so that the router learns.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.replayed_BLK: torch.Tensor | None = None  # expert ids; FREE where the router chooses

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores_BLE = F.softmax(self.gate(x_BLD).float(), dim=-1)
        ids_BLK = scores_BLE.topk(self.top_k, dim=-1, sorted=False).indices
        if self.replayed_BLK is not None:
            ids_BLK = self.replayed_BLK.where(self.replayed_BLK != FREE, ids_BLK)
        chosen_BLK = scores_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            chosen_BLK = chosen_BLK / chosen_BLK.sum(-1, keepdim=True)
        return chosen_BLK, ids_BLK, scores_BLE
