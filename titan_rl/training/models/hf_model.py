"""Builds torchtitan's model of a Hugging Face folder and loads its weights.

The folder's config and weights are compared by name and shape before anything is loaded, so that a mismatch is an
error that names the tensor and not a model that generates noise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

import titan_rl.training.device  # noqa: F401  before torchtitan
from titan_rl.errors import ModelError
from titan_rl.training.models import ARCHITECTURES, Architecture
from titan_rl.training.models.architecture import Dimensions
from titan_rl.training.models.slices import held_slices, hf_names
from titan_rl.training.parallel.parallel import full_tensor
from titan_rl.training.parallel.world import World
from titan_rl.weights.types import TensorSlice

# isort: split
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.rope import RoPE


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ModelError: it is missing, not JSON, or of a model that cannot be trained.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
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

    Args:
        max_context: the most positions that will be used; rotary caches are no longer than needed.

    Raises:
        ModelError: the folder lacks a file, is of a model that cannot be trained, or its config and weights do not fit
            together.
    """

    def __init__(self, folder: Path, device: torch.device, world: World, *, max_context: int) -> None:
        hf = read_hf_config(folder)
        self._architecture: Architecture = ARCHITECTURES[hf["model_type"]]
        config = self._architecture.build(Dimensions.of(hf, max_context), hf)
        if world.tensor_parallel > 1:
            self._architecture.plan_sharding(config)
        self.decoder = build(config, device)
        self._world = world
        self._names = hf_names(self._adapter(), self.decoder.state_dict())
        self._load(folder)

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

    def _load(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{folder} has no *.safetensors")
        expected = {name: tuple(tensor.shape) for name, tensor in self.named_tensors()}
        tied = self.decoder.enable_weight_tying
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    for name in tensors.keys():  # noqa: SIM118  a safe_open is not a mapping
                        if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                            continue
                        if name not in expected:
                            raise ModelError(f"{file} has {name!r}, which config.json does not describe")
                        shape = tuple(tensors.get_slice(name).get_shape())
                        if shape != expected[name]:
                            raise ModelError(
                                f"{name!r} in {file} has shape {shape}; config.json describes {expected[name]}"
                            )
                        weights[name] = tensors.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
        if missing := sorted(expected.keys() - weights.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(f"the weights in {folder} lack {missing[0]!r}{more}, which config.json describes")
        self.decoder.load_state_dict(self._adapter().from_hf(weights))

    def _adapter(self) -> Any:
        return self._architecture.adapter(self.decoder.config, None)


def build(config: Any, device: torch.device) -> Decoder:
    """The decoder with uninitialized float32 weights."""
    with torch.device("meta"):
        decoder = cast(Decoder, config.build())
    decoder.to_empty(device=device)
    if config.enable_weight_tying:
        # `to_empty` gave each of the two names a tensor of its own.
        decoder.tok_embeddings.weight = decoder.lm_head.weight
    for module in decoder.modules():
        if isinstance(module, RoPE | MoE):
            module._init_self_buffers(buffer_device=device)
    # Only trained positions need logits, and they are few: the head is applied after they are gathered.
    decoder._skip_lm_head = True
    return decoder
