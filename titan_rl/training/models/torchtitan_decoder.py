"""torchtitan's implementation of the model of a Hugging Face folder, as a `DecoderModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, TypeVar, cast

import torch
from torch import nn

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.training.attention.attention import Layout
from titan_rl.training.models.expert_parallel import divide_experts, fsdp_options, shard_experts
from titan_rl.training.models.experts import Router
from titan_rl.training.models.lora import with_adapter
from titan_rl.training.models.torchtitan_families import ARCHITECTURES, Architecture, DocumentAttention
from titan_rl.training.settings import AdapterConfig

# isort: split
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.protocols.sharding import ShardingConfig

T = TypeVar("T")


class TorchtitanAdapter:
    """torchtitan's translation between its own parameters and those of a Hugging Face folder."""

    def __init__(self, architecture: Architecture, config: Any) -> None:
        self._architecture, self._config = architecture, config

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._architecture.adapter(self._config, None).to_hf(state_dict)

    def from_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        config = copy(self._config)
        config.enable_weight_tying = False  # otherwise an adapter always needs the embedding
        return self._architecture.adapter(config, None).from_hf(state_dict)


class TorchtitanDecoder:
    """A decoder of a family in `ARCHITECTURES`.

    Args:
        hf: Content of config.json.
        max_context: Maximum number of positions; this determines the size of the rotary caches.
        dtype: Dtype of the trained parameters. Buffers, such as rotary caches, are float32.
        splits_matrices: Whether to prepare the sharding of tensor parallelism.
        adapter: Settings of an adapter; only the adapter is trained then.
        base_dtype: Dtype of the parameters that an adapter leaves frozen.

    Raises:
        ModelError: A field is missing in config.json.
    """

    has_variants = False
    optional_patterns: tuple[str, ...] = ()

    def __init__(
        self,
        hf: Mapping[str, Any],
        *,
        max_context: int,
        dtype: torch.dtype,
        splits_matrices: bool,
        adapter: AdapterConfig | None = None,
        base_dtype: torch.dtype | None = None,
    ) -> None:
        architecture = ARCHITECTURES[hf["model_type"]]
        config = architecture.config(hf, max_context)
        if splits_matrices:
            architecture.plan_sharding(config)
            # The head takes replicated inputs, and joins the ranks' results itself.
            held = config.lm_head.sharding_config.state_shardings
            config.lm_head.sharding_config = ShardingConfig(state_shardings=held)
        if adapter is not None:
            config = with_adapter(config, adapter)
        with torch.device("meta"):
            self.module = cast(Any, config.build())
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(dtype if parameter.requires_grad else base_dtype or dtype)
        # The head is applied only to the hidden states of trained tokens.
        cast(Decoder, self.module)._skip_lm_head = True
        self.head: nn.Module = self.module.lm_head
        self.vocab_size: int = config.vocab_size
        self.head_dim: int = config.layers[0].attention.head_dim
        self.is_tied: bool = self.module.enable_weight_tying
        self.adapter = TorchtitanAdapter(architecture, config)
        self.optional_names = frozenset({"lm_head.weight"}) if self.is_tied else frozenset[str]()
        self.routers = self._modules_of(Router)

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        return dict(self.module.layers.named_children())

    @property
    def parts(self) -> Sequence[nn.Module]:
        return (self.module.tok_embeddings, *self.blocks.values(), self.module.norm, self.head)

    @property
    def uncompiled(self) -> Sequence[nn.Module]:
        return [*self._modules_of(DocumentAttention), *self._modules_of(MoE)]

    def hidden(self, token_ids_BL: torch.Tensor, positions_BL: torch.Tensor, layout: Layout) -> torch.Tensor:
        return self.module(token_ids_BL, positions_BL, layout)

    def allocate(self, device: torch.device, *, on_host: bool) -> None:
        self.module.to_empty(device="cpu" if on_host else device)
        self.module.init_states(buffer_device=device)  # only the buffers: `KEPT` initializes no weights

    def wrap_blocks(self, checkpointing: Any) -> None:
        checkpointing.apply(self.module)

    def split_matrices(self, dims: Any) -> None:
        self.module.parallelize(dims)
        if self.is_tied:
            self.module.tok_embeddings.weight = self.head.weight  # sharding has untied them

    def divide_experts(self, mesh: Any) -> None:
        for routed in self._modules_of(RoutedExperts):
            divide_experts(routed, mesh)

    def shard(self, mesh: Any, dtype: torch.dtype, *, offload: bool, same_experts: Any = None) -> None:
        if same_experts is not None:
            for routed in self._modules_of(RoutedExperts):
                shard_experts(routed.inner_experts, same_experts, **fsdp_options(dtype, offload=offload))
        apply_fsdp_to_decoder(
            self.module, mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False, cpu_offload=offload
        )

    def _modules_of(self, kind: type[T]) -> list[T]:
        """Modules of a class, in the order of the layers."""
        return [module for module in self.module.modules() if isinstance(module, kind)]
