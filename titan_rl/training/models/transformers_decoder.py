"""transformers' implementation of the model of a Hugging Face folder, as a `DecoderModel`.

The library's attention, output layer, packing and router replay are plugged into transformers' modeling code. If one of
them cannot be plugged into a model, an error is raised before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from titan_rl.core.errors import ModelError, in_one_line
from titan_rl.training.attention.attention import CurrentLayout, Layout
from titan_rl.training.attention.variants import PLAIN, Variant
from titan_rl.training.decoder_interface import FREE, PREFIX
from titan_rl.training.models.expert_parallel import ExpertsOnRanks, fsdp_options, shard_experts
from titan_rl.training.models.families import STATEFUL, is_longrope, longest_context
from titan_rl.training.models.lora import adapt_layers
from titan_rl.training.models.recurrent import divide_mixers
from titan_rl.training.selected_logprobs import capped, selected_logprobs
from titan_rl.training.settings import AdapterConfig

ATTENTION = "titan_rl"
"""Name under which the library's attention is registered in transformers."""

_WITHOUT_EFFECT = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values", "output_attentions",
     "output_hidden_states", "output_router_logits", "return_dict", "is_causal", "layer_idx", "token_type_ids",
     "logits_to_keep", "num_items_in_batch"}
)  # fmt: skip
"""Arguments of attention functions that do not affect the scores, or that are the default of a decoder."""


@torch.compiler.disable
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, called through transformers' interface, by the layout of the batch.

    Args:
        query: Queries, [B, N, L, H].
        key: Keys, [B, M, L, H].
        value: Values, [B, M, L, H'].
        attention_mask: Must be None: the layout has the mask.
        s_aux: Sinks of the heads, [N]; see `Variant`.

    Returns:
        Outputs, [B, L, N, H'], and None in place of the attention weights.

    Raises:
        ModelError: The model uses a feature that the library's attention does not support.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _WITHOUT_EFFECT]
    if dropout:
        unknown.append("dropout")
    if attention_mask is not None:
        unknown.append("attention_mask")
    if others.get("is_causal") is False:
        unknown.append("is_causal")
    if unknown:
        raise ModelError(
            f"{type(module).__name__} of transformers passes {', '.join(unknown)} to its attention, which the "
            "library's attention does not support; this family cannot be trained"
        )
    layout: Layout = module.current_layout.get()
    variant = PLAIN
    if sliding_window is not None or softcap is not None or s_aux is not None:
        variant = Variant(sliding_window, softcap, s_aux)
    q_BLNH, k_BLMH, v_BLMH = (x.transpose(1, 2) for x in (query, key, value))
    return layout.attend(q_BLNH, k_BLMH, v_BLMH, scale=scaling, variant=variant), None


AttentionInterface.register(ATTENTION, attend)


class ScoringHead(nn.Module):
    """Output layer that also scores tokens.

    Args:
        layer: Output layer of transformers, whose parameters are used.
        scale: Factor of the logits.
        softcap: Bound of the logits; see `selected_logprobs`.
    """

    def __init__(self, layer: nn.Linear, *, scale: float = 1.0, softcap: float | None = None) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", layer.bias)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._scale, self._softcap = scale, softcap

    def forward(
        self,
        hidden_ND: torch.Tensor,
        targets_N: torch.Tensor | None = None,
        temperatures_N: torch.Tensor | None = None,
    ) -> Any:
        """Return logits, [N, V]. With targets and their temperatures, return the result of `selected_logprobs`
        instead."""
        weight_VD, bias_V = self.weight, self.bias
        if torch.is_autocast_enabled(hidden_ND.device.type):
            dtype = torch.get_autocast_dtype(hidden_ND.device.type)
            hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
            bias_V = None if bias_V is None else bias_V.to(dtype)
        if targets_N is None or temperatures_N is None:
            logits_NV = F.linear(hidden_ND, weight_VD, bias_V) * self._scale
            return logits_NV if self._softcap is None else capped(logits_NV, self._softcap)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return selected_logprobs(
                hidden_ND, weight_VD, targets_N, temperatures_N / self._scale, bias_V=bias_V, softcap=self._softcap
            )


class _GivenExperts(TorchFunctionMode):
    """Block in which `topk` over expert scores returns the given experts instead of the best ones, with the scores of
    the given experts.

    Args:
        experts_TK: Expert ids; FREE where the router chooses.
    """

    def __init__(self, experts_TK: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts_TK = experts_TK
        self._choice = (len(experts_TK), num_experts)
        self.were_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or tuple(args[0].shape) != self._choice:
            return found
        if found.indices.shape != self._experts_TK.shape:
            return found
        self.were_used = True
        indices_TK = self._experts_TK.where(self._experts_TK != FREE, found.indices)
        return torch.return_types.topk((args[0].gather(-1, indices_TK), indices_TK))


class Routing:
    """Routing of one block of experts, which can be replayed.

    Args:
        block: Module with the router and the experts.
    """

    def __init__(self, block: Any, num_experts: int, top_k: int) -> None:
        self.num_experts, self.top_k = num_experts, top_k
        self.replayed_BLK: torch.Tensor | None = None
        self._forward = block.forward
        block.forward = torch.compiler.disable(self.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's forward pass with the experts that `replayed_BLK` gives.

        Raises:
            ModelError: The router does not choose a token's experts by `topk`, so they cannot be replaced.
        """
        if self.replayed_BLK is None:
            return self._forward(*args, **kwargs)
        with _GivenExperts(self.replayed_BLK.flatten(0, 1), self.num_experts) as given:
            found = self._forward(*args, **kwargs)
        if not given.were_used:
            raise ModelError(
                "the model's router does not choose experts by top-k, so the trainer cannot use the generator's; set "
                "generation.return_routed_experts = false"
            )
        return found


class TransformersAdapter:
    """transformers' translation between the parameters of its models and the tensors of Hugging Face folders, which
    have, for example, a tensor for each expert.

    Args:
        tied: Name of the output layer's weight if it is tied to the embedding; otherwise None.
    """

    def __init__(self, causal: Any, tied: str | None) -> None:
        self._causal = causal
        self._tied = tied
        conversions = [
            conversion
            for conversion in get_model_conversion_mapping(causal, add_legacy=False)
            if not isinstance(conversion, PrefixChange)
        ]
        causal._weight_conversions = conversions or None
        self._converts = bool(conversions)
        self._renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]

    def to_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {name.removeprefix(PREFIX): tensor for name, tensor in state_dict.items()}
        own = {name: tensor for name, tensor in own.items() if name != self._tied}
        return revert_weight_conversion(self._causal, own) if self._converts else own

    def from_hf(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        found: dict[str, Any] = {}
        for name, tensor in state_dict.items():
            renamed, pattern = rename_source_key(name, self._renamings, self._converters)
            if pattern is None:
                found.setdefault(renamed, WeightRenaming(name, renamed)).add_tensor(renamed, name, name, tensor)
            else:
                mapping = found.setdefault(renamed, deepcopy(by_pattern[pattern]))
                mapping.add_tensor(renamed, name, pattern, tensor)
        made: dict[str, torch.Tensor] = {}
        for renamed, mapping in found.items():
            for name, value in mapping.convert(renamed, model=self._causal, config=self._causal.config).items():
                made[PREFIX + name] = value[0] if isinstance(value, list) else value
        return made


class _HiddenStates(nn.Module):
    """Causal language model of transformers with a forward pass that ends before the output layer."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, token_ids_BL: torch.Tensor, positions_BL: torch.Tensor) -> torch.Tensor:
        found = self.causal.base_model(input_ids=token_ids_BL, position_ids=positions_BL, use_cache=False)
        return found.last_hidden_state


class TransformersDecoder:
    """A decoder of any family that transformers has, except those in `REFUSED`.

    Args:
        folder: Folder with a config.json.
        max_context: Maximum number of positions.
        dtype: Dtype of the trained parameters. Buffers, such as rotary frequencies, are float32.
        adapter: Settings of an adapter; only the adapter is trained then.
        base_dtype: Dtype of the parameters that an adapter leaves frozen.

    Raises:
        ModelError: The family is unknown to transformers, a part of the library cannot be plugged into it, or the
            adapter does not fit it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_context: int,
        dtype: torch.dtype,
        adapter: AdapterConfig | None = None,
        base_dtype: torch.dtype | None = None,
    ) -> None:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            with _parameters_on_meta():
                causal: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        except Exception as error:  # the code of a family may raise anything for fields that it does not expect
            raise ModelError(f"transformers cannot build the model in {folder}: {in_one_line(error)}") from error
        _check_positions(config, max_context)
        causal.eval()  # disables dropout; gradients are still computed
        self._causal = causal
        self._base, self._list, self._blocks = _find_blocks(causal)
        self.is_tied = bool(config.tie_word_embeddings)
        self.head = _plug_head(causal, config)
        if adapter is not None:
            adapt_layers(causal, self._blocks, adapter)
        for parameter in causal.parameters():
            parameter.data = parameter.data.to(dtype if parameter.requires_grad else base_dtype or dtype)
        self._tie()
        self._layout = CurrentLayout()
        for module in causal.modules():
            module.current_layout = self._layout
        divide_mixers(causal, self._layout)
        self.module = _HiddenStates(causal)
        self.vocab_size: int = config.vocab_size
        heads = getattr(config, "num_attention_heads", None) or 1  # none in a model without attention
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.has_variants = _has_variants(config)
        head_name = next((each for each, module in causal.named_modules() if module is self.head), None)
        if head_name is None:
            raise ModelError(
                f"{type(causal).__name__} of transformers has no separate output layer; this family cannot be trained"
            )
        self.adapter = TransformersAdapter(causal, f"{head_name}.weight" if self.is_tied else None)
        self.optional_names = frozenset({f"{head_name}.weight"}) if self.is_tied else frozenset[str]()
        ignored = getattr(causal, "_keys_to_ignore_on_load_unexpected", None) or ()
        self.optional_patterns: tuple[str, ...] = tuple(ignored)
        self._mixtures = _find_mixtures(causal)
        top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
        self.routers = [
            Routing(block, block.experts.num_experts, top_k if isinstance(top_k, int) else 1)
            for block in self._mixtures
        ]

    @property
    def blocks(self) -> Mapping[str, nn.Module]:
        return dict(self._blocks.named_children())

    @property
    def parts(self) -> Sequence[nn.Module]:
        others = [module for module in self._base.children() if module is not self._blocks]
        return (*others, *self._blocks, self.head)

    @property
    def uncompiled(self) -> Sequence[nn.Module]:
        return ()  # functions that depend on the batch disable compilation themselves

    def hidden(self, token_ids_BL: torch.Tensor, positions_BL: torch.Tensor, layout: Layout) -> torch.Tensor:
        self._layout.set(layout)
        return self.module(token_ids_BL, positions_BL)

    def allocate(self, device: torch.device, *, on_host: bool) -> None:
        at = torch.device("cpu") if on_host else device

        def materialize(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device=at) if tensor.is_meta else tensor.to(device)

        self.module._apply(materialize)
        self._tie()

    def wrap_blocks(self, checkpointing: Any) -> None:
        for name, block in self.blocks.items():
            self._blocks.register_module(name, checkpointing._wrap_block(block, base_fqn=f"{self._list}.{name}"))

    def split_matrices(self, dims: Any) -> None:
        raise ModelError("transformers' implementation does not split matrices; set training.tensor_parallel = 1")

    def divide_experts(self, mesh: Any) -> None:
        for block, router in zip(self._mixtures, self.routers, strict=True):
            ExpertsOnRanks(block.experts, router.top_k, mesh)

    def shard(self, mesh: Any, dtype: torch.dtype, *, offload: bool, same_experts: Any = None) -> None:
        options = fsdp_options(dtype, offload=offload)
        sharded = partial(fully_shard, mesh=mesh, **options)
        if same_experts is not None:
            for block in self._mixtures:
                shard_experts(block.experts, same_experts, **options)
        embedding = self._causal.get_input_embeddings()
        if self.is_tied:
            sharded([embedding, self.head], reshard_after_forward=False)
        else:
            sharded(embedding, reshard_after_forward=True)
            sharded(self.head, reshard_after_forward=False)
        for block in self._blocks:
            sharded(block, reshard_after_forward=True)
        sharded(self.module)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # gradients are summed

    def _tie(self) -> None:
        if self.is_tied:
            self.head.weight = self._causal.get_input_embeddings().weight


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create the parameters of new modules without memory in the block. Buffers, which folders do not have, get their
    values."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = without_memory  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _check_positions(config: Any, max_context: int) -> None:
    hf = config.to_dict()
    if (most := longest_context(hf)) is None or max_context <= most:
        return
    if not is_longrope(hf):
        raise ModelError(f"config.json has max_position_embeddings {most}; {max_context} positions are needed")
    raise ModelError(
        f"config.json has rope type 'longrope', which rotates tokens of sequences longer than {most} differently from "
        f"those of shorter ones, and {max_context} positions are needed; set model.max_context to {most} or less"
    )


def _find_blocks(causal: Any) -> tuple[Any, str, nn.ModuleList]:
    """Find the decoder without its output layer, and the name and the list of its blocks."""
    base = causal.base_model
    size = causal.config.num_hidden_layers
    for name, module in base.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == size and base is not causal:
            return base, name, module
    raise ModelError(f"{type(causal).__name__} of transformers has no list of {size} blocks; it cannot be trained")


def _plug_head(causal: Any, config: Any) -> ScoringHead:
    """Replace the output layer by a `ScoringHead`."""
    layer = causal.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"{type(causal).__name__} of transformers has no linear output layer; it cannot be trained")
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # and Falcon-H1
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
    head = ScoringHead(layer, scale=scale, softcap=getattr(config, "final_logit_softcapping", None))
    causal.set_output_embeddings(head)
    return head


def _has_variants(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    has_windows = any(kind == "hybrid_sliding" or kind not in (*STATEFUL, "full_attention") for kind in kinds) or (
        not kinds and getattr(config, "sliding_window", None) is not None
    )
    return has_windows or bool(getattr(config, "attn_logit_softcapping", None)) or config.model_type == "gpt_oss"


def _find_mixtures(causal: Any) -> list[Any]:
    """Blocks of experts, in the order of the layers."""
    found = (module for module in causal.modules() if isinstance(getattr(module, "experts", None), nn.Module))
    return [block for block in found if isinstance(getattr(block.experts, "num_experts", None), int)]
