"""Reads vLLM's weights back, splitting fused and packed ones. Importing this module imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from titan_rl.core.errors import VerificationError
from titan_rl.core.tensor_checksum import box_sum, factors, row_sums, weighted_sum, word_dot
from titan_rl.generation.engine import HeldTensor

READ_COLUMNS = 4  # columns of each packed weight that are read back after a load; different ones each time

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_KEEPS_LAYOUT = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows or columns of a layer's weight that are a box of one Hugging Face tensor."""

    index: int  # index among the fused tensors
    dim: int  # dimension along which the layer's weight is cut
    offset: int  # position in the layer's weight
    size: int
    start: int  # position in the Hugging Face tensor
    global_size: int  # size of the Hugging Face tensor along `dim`

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.narrow(self.dim, self.offset, self.size)

    def start_in(self, weight: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.start if dim == self.dim else 0 for dim in range(weight.ndim))

    def global_shape(self, weight: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.global_size if dim == self.dim else size for dim, size in enumerate(weight.shape))


@dataclass(frozen=True, slots=True)
class _Packed:
    """A weight in a format that only a CPU kernel can read."""

    linear: Callable[..., torch.Tensor]  # function that computes with the weight
    dtype: torch.dtype
    shape: tuple[int, int]
    sums: list[torch.Tensor]  # checksums of the layer's parts
    first: int  # first of the columns that are read back
    values: torch.Tensor  # values of these columns, [READ_COLUMNS, num_rows]

    @staticmethod
    def of(layer: Any, weight: torch.Tensor, turn: int) -> _Packed:
        rows, width = weight.shape
        first = turn * READ_COLUMNS % max(1, width - READ_COLUMNS + 1)
        columns = weight[:, first : first + READ_COLUMNS].t().contiguous()
        return _Packed(layer.cpu_linear, weight.dtype, (rows, width), _part_sums(layer, weight), first, columns)

    def check(self, layer: Any, parameter: str) -> None:
        """Read some columns back: the kernel returns a column exactly if it multiplies with a row of zeros and a one.

        Raises:
            VerificationError: the columns differ from those that were packed.
        """
        rows = torch.zeros((len(self.values), self.shape[1]), dtype=self.dtype)
        rows.diagonal(self.first).fill_(1)
        if not torch.equal(self.linear(rows, layer.weight, None), self.values):
            raise VerificationError(f"{parameter} computes with other weights than those that were packed for it")


def _part_sums(layer: Any, weight: torch.Tensor) -> list[torch.Tensor]:
    """Checksums of the parts of a layer's weight, which is read once."""
    parts = parts_of(layer, weight)
    if any(part.dim for part in parts):
        return [box_sum(part.of(weight), part.start_in(weight)) for part in parts]
    sums = row_sums(weight)
    return [weighted_sum(part.of(sums), factors(0, part.start, part.size, weight.device)) for part in parts]


_turns = count()
pack: Any = utils.dispatch_cpu_unquantized_gemm  # vLLM's own function, which records nothing


def note_packing() -> None:
    """Make vLLM record the checksums of each weight that it packs for a CPU. Called before an engine is made."""
    utils.dispatch_cpu_unquantized_gemm = _pack_and_note


def _pack_and_note(layer: Any, remove_weight: bool) -> None:
    weight: torch.Tensor = layer.weight
    is_matrix = weight.ndim == 2  # before packing, which turns a convolution's weight into a matrix in place
    pack(layer, remove_weight)
    if is_matrix and not weight.is_meta:
        # vLLM's parameters, and its default device, would add Python code to each operation.
        with torch._C.DisableTorchFunction():
            layer.packed_weight = _Packed.of(layer, weight.detach().as_subclass(torch.Tensor), next(_turns))


def held_weights(worker: Any, is_tied: bool) -> list[HeldTensor]:
    """The weights of a worker's model, by their Hugging Face names; a tied head has those of the embedding.

    Linear layers, embeddings, the experts of a mixture, and all weights that are loaded unchanged are read. A weight
    that a CPU kernel has packed in a hidden format has its checksums from the time of packing, and some of its columns
    are read back.

    Args:
        worker: vLLM's worker.
        is_tied: Whether the head is tied to the embedding.

    Raises:
        VerificationError: a kernel computes with other weights than those that were packed for it.
    """
    modules = worker.get_model().named_modules()
    return [held for name, module in modules for held in _held(name, module, is_tied)]


def _held(path: str, module: Any, is_tied: bool) -> Iterator[HeldTensor]:
    if isinstance(module, RoutedExperts):
        yield from _experts(path, module)
        return
    is_head = is_tied and path == "lm_head"
    is_layer = isinstance(module, (LinearBase, VocabParallelEmbedding))
    if is_layer and not isinstance(module.quant_method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
        return
    for name, parameter in module.named_parameters(recurse=False):
        weight = parameter.detach().as_subclass(torch.Tensor)
        own = f"{path}.{name}"
        if (unpacked := getattr(module, "_cpu_unpacked_conv_weight", None)) is not None and name == "weight":
            weight, own = unpacked.unsqueeze(1), f"{own} (packed)"  # vLLM keeps it for other kernels
        if is_layer:
            packed: _Packed | None = getattr(module, "packed_weight", None) if name == "weight" else None
            if packed is not None and packed.linear is module.cpu_linear:
                packed.check(module, own)
                placeholder = torch.empty(packed.shape, dtype=packed.dtype, device="meta")
                for part, value in zip(parts_of(module, placeholder), packed.sums, strict=True):
                    yield HeldTensor(
                        _hf_name(path, name, part.index, is_head), f"{own} (packed)", None, part.start_in(placeholder),
                        part.global_shape(placeholder), value, packed.dtype, tuple(part.of(placeholder).shape),
                    )  # fmt: skip
            if weight.numel():
                for part in parts_of(module, weight):
                    yield HeldTensor(
                        _hf_name(path, name, part.index, is_head), own, part.of(weight), part.start_in(weight),
                        part.global_shape(weight),
                    )  # fmt: skip
        elif getattr(parameter, "weight_loader", default_weight_loader) is default_weight_loader:
            yield HeldTensor(own, own, weight, (0,) * weight.ndim, tuple(weight.shape))


def _hf_name(path: str, name: str, index: int, is_tied_head: bool) -> str:
    return f"model.embed_tokens.{name}" if is_tied_head else f"{hf_name_of(path, index)}.{name}"


def hf_name_of(path: str, index: int) -> str:
    """Hugging Face name of a layer, or of one part of a fused layer.

    Example: `hf_name_of("model.layers.0.self_attn.qkv_proj", 1)` is `"model.layers.0.self_attn.k_proj"`.
    """
    parent, _, last = path.rpartition(".")
    parts = _PARTS.get(last)
    return path if parts is None else f"{parent}.{parts[index]}"


def parts_of(layer: Any, weight: torch.Tensor) -> list[_Part]:
    """Parts of a layer's weight, in their order. Empty for an unknown kind of layer."""
    if isinstance(layer, VocabParallelEmbedding):
        indices = layer.shard_indices
        first, size = indices.org_vocab_start_index, indices.org_vocab_end_index - indices.org_vocab_start_index
        return [_Part(0, 0, 0, size, first, layer.org_vocab_size)]
    if isinstance(layer, RowParallelLinear):
        if weight.ndim == 1:
            return [_Part(0, 0, 0, len(weight), 0, len(weight))]
        return [_Part(0, 1, 0, weight.shape[1], layer.tp_rank * weight.shape[1], layer.input_size)]
    if isinstance(layer, ReplicatedLinear):
        return [_Part(0, 0, 0, len(weight), 0, len(weight))]
    if type(layer) is QKVParallelLinear:
        heads, kv_heads, replicas = layer.num_heads, layer.num_kv_heads, layer.num_kv_head_replicas
        kv_rank = layer.tp_rank // replicas
        sizes = (heads * layer.head_size, kv_heads * layer.head_size, kv_heads * layer.v_head_size)
        global_sizes = (
            layer.total_num_heads * layer.head_size,
            layer.total_num_kv_heads * layer.head_size,
            layer.total_num_kv_heads * layer.v_head_size,
        )
        starts = (layer.tp_rank * sizes[0], kv_rank * sizes[1], kv_rank * sizes[2])
    elif type(layer) is MergedColumnParallelLinear:
        global_sizes = tuple(layer.output_sizes)
        sizes = tuple(global_size // layer.tp_size for global_size in global_sizes)
        starts = tuple(layer.tp_rank * size for size in sizes)
    elif type(layer) is ColumnParallelLinear:
        global_sizes, sizes, starts = (layer.output_size,), (len(weight),), (layer.tp_rank * len(weight),)
    else:
        return []
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    places = zip(offsets, sizes, starts, global_sizes, strict=True)
    return [_Part(index, 0, *place) for index, place in enumerate(places)]


def _experts(path: str, module: Any) -> Iterator[HeldTensor]:
    """Gate, up and down projections of the experts that this rank has. Nothing if a kernel has reordered them in an
    unknown way."""
    method, config = module.quant_method, module.moe_config
    if type(method) is not UnquantizedFusedMoEMethod or not config.is_act_and_mul:
        return
    w13, w2 = module.w13_weight.detach(), module.w2_weight.detach()
    is_swapped = method.unquantized_backend is UnquantizedMoeBackend.FLASHINFER_CUTLASS
    isa = ""
    if method.unquantized_backend is UnquantizedMoeBackend.CPU:
        kernel: Any = method.moe_kernel.fused_experts  # pyright: ignore[reportOptionalMemberAccess]
        isa = "" if kernel._use_zentorch else kernel.isa
    elif not is_swapped and method.unquantized_backend not in _KEEPS_LAYOUT:
        return
    size, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
    start, global_size = config.tp_rank * size, config.tp_size * size
    half = w13.shape[1] // 2
    first, second = (half, 0) if is_swapped else (0, half)
    local = [module._map_global_expert_id_to_local_expert_id(expert) for expert in range(config.num_experts)]
    prefix = path[: path.index(".experts") + len(".experts")]
    gate_and_up = {
        module.ckpt_gate_proj_name: _ExpertBox(first, (size, hidden), (start, 0), (global_size, hidden)),
        module.ckpt_up_proj_name: _ExpertBox(second, (size, hidden), (start, 0), (global_size, hidden)),
    }
    down = {module.ckpt_down_proj_name: _ExpertBox(0, (hidden, size), (0, start), (hidden, global_size))}
    for weight, boxes in ((w13, gate_and_up), (w2, down)):
        found = _expert_checksums(weight.as_subclass(torch.Tensor), isa, tuple(boxes.values()))
        for (name, box), values in zip(boxes.items(), found, strict=False):
            for expert, at in enumerate(local):
                if at >= 0:
                    hf_name = f"{prefix}.{expert}.{name}.weight"
                    yield HeldTensor(
                        hf_name, path, None, box.start, box.global_shape, values[at], weight.dtype, box.shape
                    )


@dataclass(frozen=True, slots=True)
class _ExpertBox:
    """Rows of an expert's weight that are a box of one Hugging Face tensor."""

    row: int  # first row
    shape: tuple[int, int]
    start: tuple[int, int]  # position in the Hugging Face tensor
    global_shape: tuple[int, int]  # shape of the Hugging Face tensor


def _expert_checksums(weight_ENK: torch.Tensor, isa: str, boxes: tuple[_ExpertBox, ...]) -> list[list[int]]:
    """Checksums of all experts for each box, several times as fast as one expert at a time. Empty if they cannot be
    computed.

    Args:
        weight_ENK: Weights of all experts of this rank.
        isa: Instruction set for which the weight is packed; "" if it is not packed.
        boxes: Boxes of each expert's weight.

    Returns:
        [num_boxes][num_experts]
    """
    shape, dtype = (weight_ENK.shape[1], weight_ENK.shape[2]), weight_ENK.dtype
    per_word = 4 // dtype.itemsize
    if any(each % per_word for box in boxes for each in (shape[1], box.shape[1], box.start[1])):
        return []
    elements_EP = weight_ENK.flatten(1)
    positions = _packed_positions(shape, dtype, isa) if isa else None
    if isa and positions is None:
        return []
    if positions is not None and len(positions) > elements_EP.shape[1] // per_word:
        elements_EP, positions = elements_EP.index_select(1, positions), None  # the halves of words are separated
    words_EP = elements_EP.view(torch.int32)
    device = weight_ENK.device
    packing = isa if positions is not None else ""
    sums = [word_dot(words_EP, _expert_factors(shape, per_word, packing, dtype, box, device)) for box in boxes]
    return [[value % 2**64 for value in each] for each in torch.stack(sums).tolist()]


@lru_cache(32)
def _expert_factors(
    shape: tuple[int, int], per_word: int, isa: str, dtype: torch.dtype, box: _ExpertBox, device: torch.device
) -> torch.Tensor:
    """Factors of the words of an expert's weight, in their order, for the checksum of a box; 0 outside the box.
    # [num_words]"""
    rows, columns = box.shape[0], box.shape[1] // per_word
    found = torch.zeros((shape[0], shape[1] // per_word), dtype=torch.int64, device=device)
    by_row = factors(0, box.start[0], rows, device)
    by_column = factors(1, box.start[1] // per_word, columns, device)
    found[box.row : box.row + rows, :columns] = by_row[:, None] * by_column
    if not isa:
        return found.flatten()
    positions = _packed_positions(shape, dtype, isa)
    assert positions is not None
    packed = torch.empty_like(found).flatten()
    packed[positions] = found.flatten()
    return packed


@lru_cache(8)
def _packed_positions(shape: tuple[int, int], dtype: torch.dtype, isa: str) -> torch.Tensor | None:
    """Positions of the elements of an expert's weight after packing, found by packing their indices; positions of
    32-bit words if their halves stay together. None if packing does more than move elements.
    # [N * K] or [N * K // 2]"""
    numel = shape[0] * shape[1]
    numbers = torch.arange(numel, dtype=torch.int64)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    found = torch.zeros(numel, dtype=torch.int64)
    for shift in (0, 15):  # 15 bits at a time, so that each value is a small, positive number
        digits = ((numbers >> shift) & 0x7FFF).to(bits).view(dtype).view(1, *shape)
        found += cpu_prepack_moe_weight(digits, isa).flatten().view(bits).to(torch.int64) << shift
    if numel > 1 << 30 or not torch.equal(found.sort().values, numbers):
        return None
    positions = torch.empty_like(found)
    positions[found] = numbers
    if dtype.itemsize == 2 and not numel % 2:
        even, odd = positions.view(-1, 2).unbind(1)
        if torch.equal(even + 1, odd) and not (even % 2).any():
            return even // 2
    return positions
