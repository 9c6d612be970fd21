"""LoRA adapters: low-rank changes of a frozen model's linear layers (arXiv:2106.09685), and their folders in PEFT's
format: `adapter_config.json` and `adapter_model.safetensors`.

torchtitan's converter adapts torchtitan's models, and `adapt_layers` those of transformers.

A layer with weight W computes y = W x + (alpha / rank) B A x. A is initialized with random numbers and B with zeros, so
that the adapted model initially equals its base. Only A and B are trained, published and saved. The initial model, with
the adapter switched off or with its initial matrices, is the reference model of `training.kl_coef`.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.errors import ModelError
from titan_rl.training.models.peft_settings import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    check_same_settings,
    hf_name,
    read_adapter_config,
)
from titan_rl.training.parallel import HeldSlices, World, fill, full_tensor, local_slice, owned_slice
from titan_rl.training.settings import TARGETS, AdapterConfig
from titan_rl.training.state.checkpoint import atomic_directory
from titan_rl.training.state.train_state import write_tensors
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
    _require_targets(adapter, has)
    if len({"k_proj", "v_proj"} & {*adapter.targets}) == 1:
        raise ModelError(
            "training.adapter.targets has one of k_proj and v_proj, which torchtitan builds from one config; name both "
            "or neither"
        )
    chosen = sorted({TITAN_NAMES[target] for target in adapter.targets or has})
    settings = LoRAConverter.Config(rank=adapter.rank, alpha=adapter.alpha, target_modules=chosen)
    return LoRAConverter(settings).convert(config)


def _require_targets(adapter: AdapterConfig, has: Sequence[str]) -> None:
    if missing := [target for target in adapter.targets if target not in has]:
        raise ModelError(
            f"training.adapter.targets has {missing[0]!r}, and the model has no linear layer of that name; it has "
            f"{', '.join(has)}"
        )


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

    In a mixture of experts, linear layers next to the experts (the router, shared experts) get no adapter.

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
    _require_targets(adapter, has)
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
class AdapterMatrix:
    """Matrix A, [rank, in], or B, [out, rank], of an adapted layer.

    Attributes:
        name: Hugging Face name, without PEFT's prefix: "model.layers.0.self_attn.q_proj.lora_A.weight".
        layer: Layer whose weight the matrix is.
        rows: Order of the rows in Hugging Face; None if it is the same as in the layer.  # int64 [out]
    """

    name: str
    layer: Any
    rows: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in the layer, detached. Sharding replaces the layer's parameter."""
        return self.layer.weight.detach()

    def gathered(self) -> torch.Tensor:
        """The whole matrix as in Hugging Face. All ranks call this at the same time."""
        whole = full_tensor(self.weight)
        return whole if self.rows is None else whole[self.rows.to(whole.device)]


class Adapter:
    """The matrices of a model's adapted layers. It must be created before the model is sharded.

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
        self._layers: list[Any] = []
        self._matrices: dict[str, AdapterMatrix] = {}  # by name; A and B of each layer in turn
        for path, module in model.named_modules():
            if hasattr(module, "lora_a") and hasattr(module, "lora_b"):
                layer = cast(Any, module)
                name, rows = _order(f"{path}.weight", layer.weight.shape, hf_weight)
                a, b = _names_of(name)
                self._layers.append(layer)
                self._matrices[a] = AdapterMatrix(a, layer.lora_a, None)
                self._matrices[b] = AdapterMatrix(b, layer.lora_b, rows)

    @property
    def parts(self) -> list[nn.Module]:
        """Modules whose weights are the matrices."""
        return [each.layer for each in self._matrices.values()]

    @contextmanager
    def off(self) -> Generator[None]:
        """Switch the adapter off in the block, so that the model computes as its base."""
        for layer in self._layers:
            layer._lora_scaling = 0.0
        try:
            yield
        finally:
            for layer in self._layers:
                layer._lora_scaling = self.settings.scale

    def begin(self, seed: int) -> None:
        """Fill the matrices from the folder `training.adapter.start` or, without one, A uniformly in +-1 / sqrt(in), as
        PEFT and torchtitan initialize it, and B with zeros. The values are the same for any number of ranks.

        Raises:
            ModelError: The folder does not fit; see `load_peft`. Or it lacks a layer.
        """
        if self.settings.start is None:
            self._fill({name: _initial(name, each.weight.shape, seed) for name, each in self._matrices.items()})
        elif missing := sorted(self._matrices.keys() - self.load_peft(Path(self.settings.start))):
            raise ModelError(
                f"training.adapter.start = {self.settings.start!r} lacks {missing[0]} and {len(missing) - 1} more; set "
                "training.adapter.targets to the layers of the folder, unless that is an adapter of another model"
            )

    def load_peft(self, folder: Path) -> set[str]:
        """Fill the matrices that a folder in PEFT's format has, and return their names. PEFT may have adapted only some
        of the layers with a target's name.

        Raises:
            ModelError: The folder does not fit; see `read_peft`.
        """
        shapes = {name: tuple(each.weight.shape) for name, each in self._matrices.items()}
        found = read_peft(folder, self.settings, shapes)
        self._fill(found)
        return set(found)

    @torch.no_grad()
    def _fill(self, named: Mapping[str, torch.Tensor]) -> None:
        for name, whole in named.items():
            each = self._matrices[name]
            fill(local_slice(each.weight), whole if each.rows is None else whole[each.rows.argsort()])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all matrices, whole and detached, with their Hugging Face names. All ranks iterate at the same
        time."""
        for name, each in self._matrices.items():
            yield name, each.gathered()

    def held_slices(self, dtype: torch.dtype, world: World) -> list[tuple[str, TensorSlice]]:
        """(Hugging Face name, slice) pairs that this rank publishes, as `HFModel.held_slices` returns them.

        Args:
            dtype: Dtype of matrices whose rows are reordered, which have their own memory.
        """
        held = HeldSlices(world, dtype)
        for name, each in self._matrices.items():
            if each.rows is None:
                held.add(name, owned_slice(each.weight, world), each.weight.shape)
            else:
                held.add_gathered(name, each.gathered())
        return held.named

    def write_peft(self, directory: Path, *, base: str) -> None:
        """Write the adapter as a folder in PEFT's format; see `write_peft`."""
        targets = sorted({name.split(".")[-3] for name in self._matrices})
        write_peft(directory, dict(self.named_tensors()), self.settings, base=base, targets=targets)

    @torch.no_grad()
    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Add the adapter's change to a weight of the model: W + (alpha / rank) B A, computed in float32. All ranks
        call this at the same time.

        Args:
            name: Hugging Face name of the weight. If its layer is not adapted, the weight is returned unchanged.
        """
        a, b = (self._matrices.get(each) for each in _names_of(name))
        if a is None or b is None:
            return weight
        return weight.float() + self.settings.scale * (b.gathered().float() @ a.gathered().float())


def _names_of(weight: str) -> tuple[str, str]:
    """Hugging Face names of the matrices A and B of a weight."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


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


def write_peft(
    directory: Path, tensors: Mapping[str, torch.Tensor], settings: AdapterConfig, *, base: str, targets: list[str]
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads, all or nothing.

    Args:
        tensors: Matrices by their Hugging Face names, without PEFT's prefix.
        base: Folder of the model that the adapter changes.
        targets: Last parts of the names of the changed layers, such as "q_proj".

    Raises:
        NoSpaceError: The disk is full.
        CheckpointError: The folder could not be written; `directory` is unchanged.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with atomic_directory(directory) as temporary:
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        named = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
        write_tensors(temporary / WEIGHTS, named, named.items(), {"format": "pt"})


def read_peft(folder: Path, settings: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Read the matrices of a folder in PEFT's format, by their Hugging Face names.

    Args:
        shapes: Shapes of the matrices that the model may have, by their Hugging Face names.

    Raises:
        ModelError: The folder lacks a file; its adapter is of another kind or has another rank, alpha or other layers;
            or it has values that are not finite.
    """
    where = f"training.adapter.start = {str(folder)!r}"
    check_same_settings(read_adapter_config(folder, where), settings, where)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{where}: {WEIGHTS} cannot be read: {error}") from error
    found = {hf_name(name): each for name, each in tensors.items()}
    if extra := sorted(found.keys() - shapes.keys()):
        raise ModelError(
            f"{where} has {extra[0]} and {len(extra) - 1} more, which training.adapter.targets does not name; "
            "set targets to the layers of the folder, unless that is an adapter of another model"
        )
    for name, matrix in found.items():
        if tuple(matrix.shape) != shapes[name]:
            raise ModelError(f"{where}: {name} has shape {tuple(matrix.shape)}; this model needs {shapes[name]}")
        if not matrix.isfinite().all():
            raise ModelError(f"{where}: {name} has values that are not finite; export the adapter of an earlier step")
    return found
