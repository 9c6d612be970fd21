"""LoRA adapters: low-rank changes of a frozen model's linear layers (arXiv:2106.09685).

torchtitan's converter adapts torchtitan's models, and `adapt_layers` those of transformers.

A layer with weight W computes y = W x + (alpha / rank) B A x. A is initialized with random numbers and B with zeros, so
that the adapted model initially equals its base. Only A and B are trained, published and saved; with the adapter
switched off the model is its base, which is the reference model of `training.kl_coef`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.models.peft_folder import read_peft, write_peft
from titan_rl.training.parallel import World, entries_of, full_tensor, local_slice, own_copy, owned_slice
from titan_rl.training.settings import TARGETS, AdapterConfig
from titan_rl.weights.types import TensorSlice

# isort: split
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

TITAN_NAMES = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""Names of torchtitan's layer configs by Hugging Face's names of the layers. Keys and values are built from one
config."""


def with_adapter(config: Any, adapter: AdapterConfig) -> Any:
    """Convert a torchtitan model config: the targets get adapters, and everything else is frozen.

    Raises:
        ModelError: The model has no layer with the name of a target, or only one of `k_proj` and `v_proj` is a target.
    """
    names = {name.rpartition(".")[2] for name, part, *_ in config.traverse(Module.Config, recurse=True)
             if isinstance(part, Linear.Config)}  # fmt: skip
    has = [target for target, name in TITAN_NAMES.items() if name in names]
    if missing := [target for target in adapter.targets if target not in has]:
        raise ModelError(
            f"training.adapter.targets has {missing[0]!r}, and the model has no linear layer of that name; it has "
            f"{', '.join(has)}"
        )
    if len({"k_proj", "v_proj"} & {*adapter.targets}) == 1:
        raise ModelError(
            "training.adapter.targets has one of k_proj and v_proj, which torchtitan builds from one config; name both "
            "or neither"
        )
    chosen = sorted({TITAN_NAMES[target] for target in adapter.targets or has})
    settings = LoRAConverter.Config(rank=adapter.rank, alpha=adapter.alpha, target_modules=chosen)
    return LoRAConverter(settings).convert(config)


class AdaptedLinear(nn.Module):
    """Linear layer of transformers and its adapter: W x + bias + scale B A x.

    The matrices A and B are the weights of `lora_a` and `lora_b`, as in a layer that torchtitan has converted.

    Args:
        layer: Linear layer whose weight and bias are used.
    """

    def __init__(self, layer: nn.Linear, adapter: AdapterConfig) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.bias: nn.Parameter | None
        self.register_parameter("bias", layer.bias)
        with torch.device("meta"):
            self.lora_a = nn.Linear(layer.in_features, adapter.rank, bias=False)
            self.lora_b = nn.Linear(adapter.rank, layer.out_features, bias=False)
        self._lora_scaling = adapter.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer and its adapter.  # [..., in] -> [..., out]"""
        return F.linear(x, self.weight, self.bias) + self._lora_scaling * self.lora_b(self.lora_a(x))


def adapt_layers(model: nn.Module, blocks: nn.Module, adapter: AdapterConfig) -> None:
    """Add an adapter to the targeted linear layers of transformers' blocks, and freeze everything else.

    In a mixture of experts, linear layers beside the experts (the router, shared experts) get no adapter.

    Args:
        model: Model that contains the blocks. All of its parameters are frozen.

    Raises:
        ModelError: The blocks have no layer with the name of a target, or, without targets, they have linear layers
            with other names than `TARGETS`.
    """
    mixtures = [f"{path}." for path, module in blocks.named_modules() if hasattr(module, "experts")]
    layers = {
        path: module
        for path, module in blocks.named_modules()
        if isinstance(module, nn.Linear) and not path.startswith(tuple(mixtures))
    }
    names = sorted({path.rpartition(".")[2] for path in layers})
    has = [name for name in TARGETS if name in names]
    if missing := [target for target in adapter.targets if target not in has]:
        raise ModelError(
            f"training.adapter.targets has {missing[0]!r}, and the model has no linear layer of that name; it has "
            f"{', '.join(has)}"
        )
    if not adapter.targets and (others := [name for name in names if name not in has]):
        raise ModelError(
            f"training.adapter.targets is empty, which stands for all linear layers, and the model has "
            f"{', '.join(others)}, which cannot be adapted: generators know only {', '.join(TARGETS)} (fused layers "
            f"have a matrix A for each part); name the targets, among {', '.join(has)}"
        )
    model.requires_grad_(False)
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        if name in (adapter.targets or has):
            setattr(blocks.get_submodule(parent), name, AdaptedLinear(layer, adapter))


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """One linear layer and its matrices A, [rank, in], and B, [out, rank].

    Attributes:
        name: Hugging Face name of the layer: "model.layers.0.self_attn.q_proj".
        module: Layer whose `lora_a` and `lora_b` have the matrices.
        rows: Order of the rows of B in Hugging Face; None if it is the same as in the module.  # int64 [out]
    """

    name: str
    module: Any
    rows: torch.Tensor | None

    @property
    def names(self) -> tuple[str, str]:
        """Hugging Face names of A and B, without PEFT's prefix "base_model.model."."""
        return f"{self.name}.lora_A.weight", f"{self.name}.lora_B.weight"

    @property
    def matrices(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.module.lora_a.weight, self.module.lora_b.weight


class Adapter:
    """The adapted layers of a model. It must be created before the model is sharded.

    Args:
        hf_weight: Function from the module's name of a weight and a tensor of its shape to Hugging Face's name and
            tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: AdapterConfig,
        hf_weight: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]],
    ) -> None:
        self.settings = settings
        self.layers: list[AdaptedLayer] = []
        for path, module in model.named_modules():
            if hasattr(module, "lora_a") and hasattr(module, "lora_b"):
                name, rows = _order(f"{path}.weight", cast(torch.Tensor, module.weight).shape, hf_weight)
                self.layers.append(AdaptedLayer(name.removesuffix(".weight"), module, rows))

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the matrices by their Hugging Face names."""
        return {
            name: tuple(matrix.shape)
            for layer in self.layers
            for name, matrix in zip(layer.names, layer.matrices, strict=True)
        }

    @contextmanager
    def off(self) -> Generator[None]:
        """Switch the adapter off in the block, so that the model computes as its base."""
        scales = [layer.module._lora_scaling for layer in self.layers]
        for layer in self.layers:
            layer.module._lora_scaling = 0.0
        try:
            yield
        finally:
            for layer, scale in zip(self.layers, scales, strict=True):
                layer.module._lora_scaling = scale

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Fill the matrices from the folder `training.adapter.start` or, without one, A uniformly in +-1 / sqrt(in), as
        PEFT and torchtitan initialize it, and B with zeros. The values are the same for any number of ranks.

        Raises:
            ModelError: The folder does not fit; see `read_peft`.
        """
        start = None
        if self.settings.start is not None:
            start = read_peft(Path(self.settings.start), self.settings, self._shapes)
        for layer in self.layers:
            for name, matrix in zip(layer.names, layer.matrices, strict=True):
                full = _initial(name, matrix.shape, seed) if start is None else start[name]
                if layer.rows is not None and name == layer.names[1]:
                    full = full[torch.argsort(layer.rows)]
                piece = local_slice(matrix)
                box = zip(piece.position.start, piece.tensor.shape, strict=True)
                piece.tensor.copy_(full[tuple(slice(first, first + size) for first, size in box)])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all matrices, whole and detached, with their Hugging Face names. All ranks iterate at the same
        time."""
        for layer in self.layers:
            a, b = (full_tensor(matrix.detach()) for matrix in layer.matrices)
            yield layer.names[0], a
            yield layer.names[1], b if layer.rows is None else b[layer.rows.to(b.device)]

    def held_slices(self, dtype: torch.dtype, world: World) -> list[tuple[str, TensorSlice]]:
        """(Hugging Face name, slice) pairs that this rank publishes, as `HFModel.held_slices` returns them.

        Args:
            dtype: Dtype of matrices whose rows are reordered, which have memory of their own.
        """
        turns, found = count(), list[tuple[str, TensorSlice]]()
        for layer in self.layers:
            for name, matrix in zip(layer.names, layer.matrices, strict=True):
                matrix = matrix.detach()
                if layer.rows is not None and name == layer.names[1]:
                    full = full_tensor(matrix)[layer.rows.to(matrix.device)]
                    is_owner = next(turns) % world.size == world.rank
                    piece = local_slice(own_copy(full, dtype)) if is_owner else None
                else:
                    piece = owned_slice(matrix, world)
                found += entries_of(name, piece, matrix.shape, dtype, world)
        return found

    def write_peft(self, directory: Path, *, base: str) -> None:
        """Write the adapter as a folder in PEFT's format; see `peft_folder.write_peft`."""
        targets = sorted({layer.name.rpartition(".")[2] for layer in self.layers})
        write_peft(directory, dict(self.named_tensors()), self.settings, base=base, targets=targets)

    def deltas(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Functions that compute (alpha / rank) B A in float32, by the Hugging Face name of the weight to which this
        change is added. All ranks call each function at the same time."""
        return {f"{layer.name}.weight": WeightChange(layer, self.settings.scale) for layer in self.layers}


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Function that computes the change of one weight by its adapter: [out, in], float32."""

    layer: AdaptedLayer
    scale: float

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        a, b = (full_tensor(matrix).float() for matrix in self.layer.matrices)
        b = b if self.layer.rows is None else b[self.layer.rows.to(b.device)]
        return self.scale * (b @ a)


def _order(
    parameter: str, shape: torch.Size, hf_weight: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]
) -> tuple[str, torch.Tensor | None]:
    """Hugging Face name of a weight, and the order of its rows there; None if the order is the same as in the module.

    The rows of Llama's queries and keys are in another order in Hugging Face, which rotates the halves of a head.
    """
    numbers = torch.arange(shape[0], dtype=torch.int32)
    name, found = hf_weight(parameter, numbers[:, None].expand(shape))
    rows = found[:, 0].to(torch.int64)
    return name, None if torch.equal(rows, numbers.to(torch.int64)) else rows


def _initial(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed % 2**32))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
