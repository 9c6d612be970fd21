"""Builds torchtitan's model of a Hugging Face folder and loads its weights.

The folder's config and weights are compared by name and shape before anything is loaded, so that a mismatch is an
error that names the tensor and not a model that generates noise.

No rank ever holds more of the model than its part, and one tensor: it is built without memory, spread over the ranks,
and what each of them holds is then read from the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, cast

import torch

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.training.models import ARCHITECTURES, Architecture
from titan_rl.training.models.architecture import Dimensions
from titan_rl.training.models.hf_weights import HFWeights
from titan_rl.training.models.slices import held_slices, hf_names
from titan_rl.training.parallel.parallel import full_tensor, local_slice
from titan_rl.training.parallel.world import World
from titan_rl.weights.types import SlicePosition, TensorSlice

# isort: split
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.sharding import ShardingConfig


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelError: it is missing, not JSON, or of a model that cannot be trained.
    """
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no config.json; model.path must be a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if (name := config.get("model_type")) not in ARCHITECTURES:
        raise ModelError(f"{path} has model_type {name!r}; {', '.join(ARCHITECTURES)} can be trained")
    for key, value in ARCHITECTURES[name].supported.items():
        if (found := config.get(key, value)) != value:
            raise ModelError(f"{path} has {key} {found!r}; only {value!r} is supported")
    return cast(dict[str, Any], config)


class HFModel:
    """A decoder and its names in a Hugging Face folder. Its forward returns hidden states; `lm_head` is applied apart.

    It has no memory before `load`, so that it can be spread over ranks first.

    Args:
        max_context: the most positions that will be used; rotary caches are no longer than needed.
        dtype: of the parameters. Buffers, such as rotary caches, are float32.

    Raises:
        ModelError: the folder lacks a file, is of a model that cannot be trained, or its config and weights do not fit
            together.
    """

    def __init__(self, folder: Path, world: World, *, max_context: int, dtype: torch.dtype = torch.float32) -> None:
        hf = read_hf_config(folder)
        self._architecture: Architecture = ARCHITECTURES[hf["model_type"]]
        config = self._architecture.build(Dimensions.of(hf, max_context), hf)
        if world.tensor_parallel > 1:
            self._architecture.plan_sharding(config)
            # The head takes what every rank has whole, and joins the ranks' results itself.
            held = config.lm_head.sharding_config.state_shardings
            config.lm_head.sharding_config = ShardingConfig(state_shardings=held)
        with torch.device("meta"):
            self.decoder = cast(Decoder, config.build())
        for parameter in self.decoder.parameters():
            parameter.data = parameter.data.to(dtype)
        # The head is applied to the hidden states of trained tokens alone.
        self.decoder._skip_lm_head = True
        self._world = world
        self._names = hf_names(self._adapter(), self.decoder.state_dict())
        self.layout = dict(self.named_tensors())  # without memory, whatever becomes of the decoder
        expected = {name: tuple(tensor.shape) for name, tensor in self.layout.items()}
        tied = self.decoder.enable_weight_tying
        self._weights = HFWeights(
            folder,
            expected,
            lambda name: name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"),
        )

    def load(self, device: torch.device, *, on_host: bool = False) -> None:
        """Give the decoder memory, and read into it what this rank holds.

        Args:
            device: The device that computes; buffers are there.
            on_host: Keep the parameters in the host's memory.

        Raises:
            ModelError: a file cannot be read.
        """
        self.decoder.to_empty(device="cpu" if on_host else device)
        self.decoder.init_states(buffer_device=device)  # the buffers: `KEPT` draws no weights
        for parameter, tensor in self.decoder.state_dict().items():
            piece = local_slice(tensor)
            if (direct := self._names[parameter]) is None:
                whole = self._computed(parameter, piece.position)
                piece.tensor.copy_(_cut(whole, piece))
            elif direct.are_rows:
                first, *start = piece.position.start
                position = SlicePosition(tuple(start), piece.position.whole_shape[1:])
                for name, row in zip(direct.names[first:], piece.tensor, strict=False):
                    self._weights.copy_into(row, name, position)
            else:
                for name in direct.names:
                    self._weights.copy_into(piece.tensor, name, piece.position)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, detached, whole, and where that is possible sharing the model's
        memory. All ranks iterate at the same time.

        With tied embeddings there is no `lm_head.weight`.
        """
        adapter = self._adapter()
        for name, tensor in self.decoder.state_dict().items():
            yield from adapter.to_hf({name: full_tensor(tensor)}).items()

    def held_slices(self, dtype: torch.dtype) -> list[tuple[str, TensorSlice]]:
        """What this rank publishes: see `titan_rl.training.models.slices.held_slices`."""
        return held_slices(self.decoder.state_dict(), self._names, self._adapter(), self._world, dtype)

    def _computed(self, parameter: str, position: SlicePosition) -> torch.Tensor:
        """A whole parameter that the adapter makes of its Hugging Face tensors."""
        config = copy(self.decoder.config)
        config.enable_weight_tying = False  # else an adapter wants the embedding with whatever it translates
        adapter = self._architecture.adapter(config, None)
        names = adapter.to_hf({parameter: torch.empty(position.whole_shape, device="meta")})
        return adapter.from_hf({name: self._weights.read(name) for name in names})[parameter]

    def _adapter(self) -> Any:
        return self._architecture.adapter(self.decoder.config, None)


def _cut(whole: torch.Tensor, piece: TensorSlice) -> torch.Tensor:
    sizes = zip(piece.position.start, piece.tensor.shape, strict=True)
    return whole[tuple(slice(first, first + size) for first, size in sizes)]
