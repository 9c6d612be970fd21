"""Model of a Hugging Face folder: loading of its weights, and the slices that each rank publishes.

The folder's config and weights are compared by name and shape before anything is loaded, so that a mismatch is an
error that names the tensor, not a model that generates noise.

No rank holds more than its part of the model and one tensor at a time: the model is built without memory, sharded over
the ranks, and each rank then reads its part from the files.

A parameter may just have another name in the folder than in the module, or be one tensor in the module and one or
several per row in the folder (experts, with gate and up projection in one matrix or two). The ranks that hold such a
parameter publish it without communication. A tensor that has to be computed (Llama's queries and keys in torchtitan) is
gathered, and the ranks take turns in publishing such tensors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.training.choices import Implementation
from titan_rl.training.decoder_interface import DecoderModel
from titan_rl.training.models.families import choose_implementation, is_untrained
from titan_rl.training.models.finite_weights import require_finite
from titan_rl.training.models.lora import Adapter
from titan_rl.training.parallel import HeldSlices, World, fill, full_tensor, local_slice, owned_slice
from titan_rl.training.settings import AdapterConfig
from titan_rl.weights.types import SlicePosition, TensorSlice

logger = logging.getLogger(__name__)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        ModelError: The file is missing, or is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; model.path must be a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a JSON object")
    return cast(dict[str, Any], config)


class HFModel:
    """A decoder, and the names of its parameters in a Hugging Face folder.

    No memory is allocated before `load`, so that the decoder can be sharded first.

    Args:
        max_context: Maximum number of positions; this determines the size of the rotary caches.
        dtype: Dtype of the trained parameters. Buffers, such as rotary caches, are float32.
        adapter: Settings of an adapter; only the adapter is trained then.
        base_dtype: Dtype of the parameters that an adapter leaves frozen.
        seed: Seed of the adapter's initial values.
        implementation: Implementation to use; see `choose_implementation`.

    Raises:
        ModelError: The folder lacks a file, its model cannot be trained, or its config and weights do not fit together.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        max_context: int,
        dtype: torch.dtype = torch.float32,
        adapter: AdapterConfig | None = None,
        base_dtype: torch.dtype | None = None,
        seed: int = 0,
        implementation: Implementation = "auto",
    ) -> None:
        hf = read_hf_config(folder)
        chosen = choose_implementation(
            hf,
            implementation,
            tensor_parallel=world.tensor_parallel,
            expert_parallel=world.expert_parallel,
            context_parallel=world.context_parallel,
            has_adapter=adapter is not None,
        )
        self.decoder: DecoderModel
        if chosen.name == "transformers":
            from titan_rl.training.models.transformers_decoder import TransformersDecoder

            self.decoder = TransformersDecoder(
                folder, max_context=max_context, dtype=dtype, adapter=adapter, base_dtype=base_dtype
            )
        else:
            from titan_rl.training.models.torchtitan_decoder import TorchtitanDecoder

            self.decoder = TorchtitanDecoder(
                hf,
                max_context=max_context,
                dtype=dtype,
                splits_matrices=world.tensor_parallel > 1,
                adapter=adapter,
                base_dtype=base_dtype,
            )
        self._world = world
        self._seed = seed
        self._names = {name: _hf_names(self.decoder.adapter, name, tensor.shape) for name, tensor in self._base()}
        self.adapter = None if adapter is None else Adapter(self.decoder.module, adapter, self._hf_weight)
        self.layout = dict(self.named_tensors())  # dtypes and shapes, without memory
        expected = {name: tuple(tensor.shape) for name, tensor in self.layout.items()}
        self._weights = HFWeights(folder, hf, expected, self.decoder.optional_names, self.decoder.optional_patterns)

    def load(self, device: torch.device, *, on_host: bool = False) -> None:
        """Allocate the decoder's memory, and read this rank's part into it.

        Args:
            device: Device of the computation and of the buffers.
            on_host: Keep the parameters in the host's memory.

        Raises:
            ModelError: A file cannot be read.
        """
        if names := self.untrained_names:
            logger.warning("the folder has tensors that are not trained: %s", ", ".join(names))
        self.decoder.allocate(device, on_host=on_host)
        for parameter, tensor in self._base():
            piece = local_slice(tensor)
            if (direct := self._names[parameter]) is None:
                fill(piece, self._computed(parameter, piece.position))
            else:
                for name, part in direct.items():
                    if (own := _of_part(piece, part)) is not None:
                        self._weights.copy_into(own, name)
        if self.adapter is not None:
            self.adapter.begin(self._seed)

    def share(self, other: HFModel, device: torch.device) -> None:
        """Allocate the decoder's memory as `load` does, but share the frozen weights of another model of the same
        folder. Only the adapter has its own memory. The world must have one rank.

        Args:
            other: Model that has loaded its weights, in the same dtype.
        """
        self.decoder.allocate(device, on_host=False)
        parameters, shared = (
            dict(each.decoder.module.named_parameters(remove_duplicate=False)) for each in (self, other)
        )
        buffers = dict(other._base())
        for name, tensor in self._base():
            if name in parameters:
                parameters[name].data = shared[name].data
            else:
                tensor.copy_(buffers[name])
        if self.adapter is not None:
            self.adapter.begin(self._seed)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all parameters, detached and whole, with their Hugging Face names. A tensor shares the model's
        memory if possible.

        An adapter is merged into the weights. All ranks iterate at the same time. With tied embeddings there is no
        `lm_head.weight`.
        """
        translation = self.decoder.adapter
        for parameter, tensor in self._base():
            for name, weight in translation.to_hf({parameter: full_tensor(tensor)}).items():
                yield name, weight if self.adapter is None else self.adapter.merged(name, weight)

    @property
    def untrained_names(self) -> Sequence[str]:
        """Names of the folder's tensors that the model does not have, such as layers that predict further tokens."""
        return sorted(self._weights.untrained)

    def untrained_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors with `untrained_names`, which are read from the folder as they are.

        Raises:
            ModelError: A file cannot be read.
        """
        for name in self.untrained_names:
            yield name, self._weights.read(name)

    def held_slices(self, dtype: torch.dtype) -> list[tuple[str, TensorSlice]]:
        """(Hugging Face name, slice) pairs that this rank publishes: those of the adapter if there is one. All ranks
        call this at the same time.

        Together the ranks have every element once. The first rank names every tensor, even those that other ranks hold
        completely, so that readers notice a missing part.

        Args:
            dtype: Dtype of gathered tensors, which have their own memory. All others share the parameters' memory and
                dtype.
        """
        if self.adapter is not None:
            return self.adapter.held_slices(dtype, self._world)
        translation, held = self.decoder.adapter, HeldSlices(self._world, dtype)
        for parameter, tensor in self._base():
            if (direct := self._names[parameter]) is None:
                for name, made in translation.to_hf({parameter: full_tensor(tensor)}).items():
                    held.add_gathered(name, made)
            else:
                piece = owned_slice(tensor, self._world)
                for name, part in direct.items():
                    own = None if piece is None else _of_part(piece, part)
                    shape = tensor.shape if part is None else torch.Size((part.size, *tensor.shape[2:]))
                    held.add(name, own, shape)
        return held.named

    def _computed(self, parameter: str, position: SlicePosition) -> torch.Tensor:
        """Read the Hugging Face tensors of a parameter, and translate them to the whole parameter."""
        translation = self.decoder.adapter
        names = translation.to_hf({parameter: torch.empty(position.global_shape, device="meta")})
        return translation.from_hf({name: self._weights.read(name) for name in names})[parameter]

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the parameters with the module's names, without those of an adapter."""
        for name, tensor in self.decoder.module.state_dict().items():
            if ".lora_a." not in name and ".lora_b." not in name:
                yield name, tensor

    def _hf_weight(self, parameter: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Translate one weight to its Hugging Face name and layout."""
        ((name, weight),) = self.decoder.adapter.to_hf({parameter: tensor}).items()
        return name, weight


@dataclass(frozen=True, slots=True)
class RowPart:
    """Place of a Hugging Face tensor in a parameter that stacks several of them.

    Example: if `gate_up_proj` stacks 768 rows of gates above 768 rows of up projections, the up projection of expert 3
    is at `row` 3 from `first` 768, of `size` 768.
    """

    row: int
    first: int
    size: int


Places = Mapping[str, RowPart | None]
"""Places, by name, of the Hugging Face tensors in a parameter; None for a tensor that is the whole parameter. A
parameter that is tied to another one has no tensors."""


def _hf_names(translation: Any, parameter: str, shape: torch.Size) -> Places | None:
    """Hugging Face tensors of a parameter, by name, with their places in it; None if the translation computes them."""
    tensor = torch.empty(shape, device="meta")
    made: dict[str, torch.Tensor] = translation.to_hf({parameter: tensor})
    if all(value is tensor for value in made.values()):
        return dict.fromkeys(made)
    if len(shape) < 2 or len(made) < shape[0]:
        return None
    # Rows of numbered entries show which rows a tensor has, and in which order.
    short = [2 for _ in shape[2:]]
    numbered = torch.arange(shape[0] * shape[1] * prod(short)).view(*shape[:2], *short)
    parts: dict[str, RowPart] = {}
    for name, rows in translation.to_hf({parameter: numbered}).items():
        row, first = divmod(int(rows.flatten()[0]) // prod(short), shape[1])
        part = numbered[row, first : first + len(rows)]
        if rows.shape != part.shape or not torch.equal(rows, part) or made[name].shape[1:] != shape[2:]:
            return None
        parts[name] = RowPart(row, first, len(rows))
    return parts if sum(each.size for each in parts.values()) == shape[0] * shape[1] else None


def _of_part(piece: TensorSlice, part: RowPart | None) -> TensorSlice | None:
    """The part of a Hugging Face tensor that a slice of the parameter contains, sharing its memory; None if it contains
    nothing of the tensor."""
    if part is None:
        return piece
    row, first, *start = piece.position.start
    rows, size = piece.tensor.shape[:2]
    begin, end = max(first, part.first), min(first + size, part.first + part.size)
    if not row <= part.row < row + rows or begin >= end:
        return None
    return TensorSlice(
        piece.tensor[part.row - row, begin - first : end - first],
        SlicePosition((begin - part.first, *start), (part.size, *piece.position.global_shape[2:])),
    )


class HFWeights:
    """Weight files of a Hugging Face folder, whose names and shapes are compared before any weight is read.

    Args:
        expected: Shapes by tensor name, as config.json describes them.
        hf: Content of config.json.
        optional: Names of tensors that are ignored if the folder has them, in addition to rotary frequencies.
        patterns: Regular expressions of tensors that the folder may have and the model does not; see also
            `is_untrained`.

    Attributes:
        untrained: Files of these tensors, by name.

    Raises:
        ModelError: The folder has no weights, or they differ from the expected ones in name or shape.
    """

    def __init__(
        self,
        folder: Path,
        hf: Mapping[str, Any],
        expected: Mapping[str, tuple[int, ...]],
        optional: Collection[str],
        patterns: Collection[str],
    ) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no *.safetensors")
        self._files: dict[str, Path] = {}
        self.untrained: dict[str, Path] = {}
        for file in files:
            with _opened(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118  a safe_open is not a mapping
                    if name in optional or name.endswith("rotary_emb.inv_freq"):
                        continue
                    if name not in expected:
                        if is_untrained(name, hf) or any(re.search(pattern, name) for pattern in patterns):
                            self.untrained[name] = file
                            continue
                        raise ModelError(f"{file} has {name!r}, which config.json does not describe")
                    shape = tuple(tensors.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise ModelError(
                            f"{name!r} in {file} has shape {shape}; config.json describes {expected[name]}"
                        )
                    self._files[name] = file
        if missing := sorted(expected.keys() - self._files.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"the weights in {folder} lack {missing[0]!r}{more}, which config.json describes")

    def copy_into(self, piece: TensorSlice, name: str) -> None:
        """Fill a slice, on any device and of any dtype, from the tensor of that name.

        The file is mapped only during the call, because mapped pages count as this process's memory.

        Raises:
            ModelError: The file cannot be read, or has values that are not finite.
        """
        with _opened(self._files[name]) as tensors:
            fill(piece, tensors.get_slice(name))
        require_finite(piece.tensor, name, self._files[name])

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor.

        Raises:
            ModelError: The file cannot be read, or has values that are not finite.
        """
        file = self._files.get(name) or self.untrained[name]
        with _opened(file) as tensors:
            tensor = tensors.get_tensor(name).clone()
        require_finite(tensor, name, file)
        return tensor


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
