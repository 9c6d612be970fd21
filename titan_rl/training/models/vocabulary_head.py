"""The last layer: torchtitan's output layer, which also scores tokens in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.training.selected_logprobs import VocabularyShard, selected_logprobs

# isort: split
from torchtitan.models.common.linear import Linear


class VocabularyHead(Linear):
    """torchtitan's output layer, which scores tokens, too. Ranks of tensor parallel have a part of the vocabulary each,
    and gather no other's to score."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor | None = None,
        temperatures_N: torch.Tensor | None = None,
    ) -> Any:
        """Logits, whole on every rank, of hidden states alone: [N, V]. Of targets and their temperatures, too, what
        `selected_logprobs` gives."""
        weight_VD, shard = self.weight, None
        if torch.is_autocast_enabled(hidden_ND.device.type):
            dtype = torch.get_autocast_dtype(hidden_ND.device.type)
            hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        if isinstance(weight_VD, DTensor):
            _, (start, _) = compute_local_shape_and_global_offset(
                weight_VD.shape, weight_VD.device_mesh, weight_VD.placements
            )
            weight_VD, shard = weight_VD.to_local(), VocabularyShard(start, weight_VD.device_mesh)
        if targets_N is None or temperatures_N is None:
            logits_NV = F.linear(hidden_ND, weight_VD)
            if shard is None:
                return logits_NV
            whole = torch.Size((len(hidden_ND), len(self.weight)))  # ranks may have unequal parts
            of_all = DTensor.from_local(logits_NV, shard.mesh, [Shard(-1)], shape=whole, stride=(whole[1], 1))
            return of_all.full_tensor()
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return selected_logprobs(hidden_ND, weight_VD, targets_N, temperatures_N, shard=shard)
