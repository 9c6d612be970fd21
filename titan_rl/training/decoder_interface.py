"""Interface between a policy and the implementation of its decoder, torchtitan's or transformers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from titan_rl.training.attention.attention import Layout

PREFIX = "causal."
"""Prefix of parameter names in a module of the transformers implementation."""

READS_PARTS = "reads_weights_of_parts"
"""Attribute of modules whose forward pass reads the weights of submodules without calling them, so that the hooks of
these submodules do not run."""

FREE = -1
"""Placeholder for an expert that the router chooses itself."""


class NameAdapter(Protocol):
    """Translation between the parameters of a module and the tensors of a Hugging Face folder."""

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert parameters to tensors of the folder. A parameter that is tied to another one has no tensor there."""
        ...

    def from_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert tensors of the folder to parameters."""
        ...


class ReplayedRouter(Protocol):
    """A router of a mixture of experts, whose choice can be replaced: router replay (R3, arXiv:2510.11370)."""

    top_k: int
    num_experts: int
    replayed_BLK: torch.Tensor | None


class DecoderModel(Protocol):
    """Decoder of a policy, whose parameters have no memory before `allocate`.

    Attributes:
        module: Module with all parameters, for FSDP, optimizers and checkpoints.
        head_dim: Size of a query head.
        is_tied: Whether the output layer shares the embedding's weights.
        has_variants: Whether some attention differs from plain causal attention; see `Variant`.
        optional_names: Names of tensors that are ignored if the folder has them.
        optional_patterns: Regular expressions of further such names.
    """

    module: Any
    vocab_size: int
    head_dim: int
    is_tied: bool
    has_variants: bool
    optional_names: frozenset[str]
    optional_patterns: tuple[str, ...]

    @property
    def head(self) -> nn.Module:
        """Output layer. `head(hidden_ND)` returns logits. `head(hidden_ND, targets_N, temperatures_N)` returns the
        result of `selected_logprobs`."""
        ...

    @property
    def adapter(self) -> NameAdapter:
        """Names of the parameters in Hugging Face folders."""
        ...

    @property
    def routers(self) -> Sequence[ReplayedRouter]:
        """Routers in the order of the layers; none in a dense model."""
        ...

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        """The transformer blocks by name, in order."""
        ...

    @property
    def parts(self) -> Sequence[nn.Module]:
        """Modules that together hold all parameters, in the order in which a forward pass calls them."""
        ...

    @property
    def uncompiled(self) -> Sequence[nn.Module]:
        """Modules that are not compiled, because their shapes depend on the documents or the routing of a batch."""
        ...

    def hidden(self, token_ids_BL: torch.Tensor, positions_BL: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Hidden states before the output layer. The layout is used until the next call, because backward may
        recompute the pass.  # [B, L, D]"""
        ...

    def allocate(self, device: torch.device, *, on_host: bool) -> None:
        """Allocate the parameters without values, and the buffers with their values.

        Args:
            on_host: Keep the parameters in the host's memory.
        """
        ...

    def wrap_blocks(self, checkpointing: Any) -> None:
        """Checkpoint the activations of the blocks with a checkpointing policy of torchtitan."""
        ...

    def split_matrices(self, dims: Any) -> None:
        """Split the weight matrices over ranks (tensor parallelism)."""
        ...

    def divide_experts(self, mesh: Any) -> None:
        """Divide the experts of each layer over the ranks of a mesh (expert parallelism)."""
        ...

    def shard(self, mesh: Any, dtype: torch.dtype, *, offload: bool, same_experts: Any = None) -> None:
        """Shard the parameters with FSDP2, layer by layer.

        Args:
            dtype: Dtype in which the parameters are gathered.
            same_experts: Mesh of the ranks with the same experts, if experts are divided.
        """
        ...


def replay(routers: Sequence[ReplayedRouter], experts_BLRK: torch.Tensor | None) -> None:
    """Make the R routers use these experts in forward and backward passes. With None, they choose again."""
    for index, router in enumerate(routers):
        router.replayed_BLK = None if experts_BLRK is None else experts_BLRK[:, :, index]
