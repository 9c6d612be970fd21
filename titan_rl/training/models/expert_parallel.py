"""Expert parallelism: the experts of each layer are divided over ranks, and tokens are sent to the ranks that hold
their experts (GShard, arXiv:2006.16668).

Each rank holds a range of the experts of every layer. In a forward pass an all-to-all sends each routed token to the
rank of its expert, which multiplies the tokens of each expert by its matrices; a second all-to-all sends the results
back, where they are weighted and summed. The backward pass sends gradients the same way. So a rank gathers no expert of
another rank, and the gradient of an expert needs no sum except over the ranks that share the expert by FSDP.

The exchange is torchtitan's. `divide_experts` is for torchtitan's layers, and `ExpertsOnRanks` for those of
transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.parallel import local

# isort: split
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher


def divide_experts(routed: RoutedExperts, mesh: Any) -> None:
    """Divide the experts of a torchtitan layer over the ranks of a mesh, in place, before their memory is allocated."""
    experts: Any = routed.inner_experts
    routed.token_dispatcher = _exchange(experts.num_experts, routed.token_dispatcher.top_k, mesh)
    _divide_parameters(experts, mesh)


class ExpertsOnRanks:
    """Forward pass of a transformers block whose experts are divided over ranks. Each rank runs transformers' code on
    its own experts, with one expert for each routed token.

    Args:
        experts: Block of experts. The first dimension of its parameters is that of the experts, and their memory is not
            yet allocated.
        top_k: Number of experts per token.
        mesh: Ranks over which the experts are divided.
    """

    def __init__(self, experts: Any, top_k: int, mesh: Any) -> None:
        self._experts = experts
        self._num_experts: int = experts.num_experts
        self._exchange: Any = _exchange(experts.num_experts, top_k, mesh)
        self._forward_own = experts.forward
        _divide_parameters(experts, mesh)
        experts.num_experts //= mesh.size()
        experts.forward = torch.compiler.disable(self.forward)

    def forward(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Compute the weighted sum of each token's experts.  # [T, D]"""
        counts_E = ids_TK.flatten().bincount(minlength=self._num_experts)
        routed_RD, own_counts_E, sent = self._exchange.dispatch(x_TD, weights_TK, ids_TK, counts_E)
        own_ids_R = torch.arange(len(own_counts_E), device=x_TD.device).repeat_interleave(own_counts_E)
        size = len(routed_RD)
        if not size:  # one row, so that all parameters have a gradient for FSDP to sum over ranks
            routed_RD, own_ids_R = nn.functional.pad(routed_RD, (0, 0, 0, 1)), own_ids_R.new_zeros(1)
        given = dict(self._experts._parameters)
        self._experts._parameters.update({name: local(each) for name, each in given.items() if each is not None})
        try:
            out_RD = self._forward_own(routed_RD, own_ids_R[:, None], routed_RD.new_ones(len(routed_RD), 1))
        finally:
            self._experts._parameters.update(given)
        return self._exchange.combine(out_RD[:size], sent, x_TD)


def fsdp_options(dtype: torch.dtype, *, offload: bool) -> dict[str, Any]:
    """Options of `fully_shard` to gather parameters in a dtype and sum gradients in float32.

    Args:
        offload: Whether to keep parameters and gradients in the host's memory.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return {"mp_policy": policy, **({"offload_policy": CPUOffloadPolicy()} if offload else {})}


def shard_experts(experts: nn.Module, mesh: Any, **options: Any) -> None:
    """Shard divided experts with FSDP, over the ranks that hold the same ones.

    The dimension that is split must be divisible by the number of ranks: torch cannot locate the parts of a dimension
    that is split twice and unevenly.

    Args:
        mesh: Ranks that hold the same experts. FSDP needs a mesh even for a single rank.
        options: Further options of `fully_shard`.

    Raises:
        ModelError: No dimension is divisible by the number of ranks.
    """

    def placement(parameter: nn.Parameter) -> Shard:
        assert isinstance(parameter, DTensor), "experts are divided first"
        own = parameter.to_local().shape
        found = next((dim for dim, size in enumerate(own) if size % mesh.size() == 0), None)
        if found is None:
            raise ModelError(
                f"experts of shape {tuple(parameter.shape)} cannot be shared by training.expert_parallel = "
                f"{parameter.device_mesh.size()} times {mesh.size()} ranks, because {mesh.size()} divides none of "
                f"{tuple(own)}; set training.expert_parallel so that it does"
            )
        return Shard(found)

    fully_shard(experts, mesh=mesh, shard_placement_fn=placement, **options)


def _exchange(num_experts: int, top_k: int, mesh: Any) -> AllToAllTokenDispatcher:
    set_spmd_backend("partial_dtensor")  # the backend of `World`; by default the exchange expects typed tensors
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=top_k).build()
    dispatcher.wire_meshes(ep_mesh=mesh)
    return dispatcher


def _divide_parameters(experts: nn.Module, mesh: Any) -> None:
    """Replace the parameters by DTensors whose first dimension is split over the mesh."""
    split = partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)], src_data_rank=None)
    for name, parameter in experts.named_parameters(recurse=False):
        assert parameter.is_meta, "experts are divided before they have memory"
        experts.register_parameter(name, nn.Parameter(split(parameter.detach()), parameter.requires_grad))
