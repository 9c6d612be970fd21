"""Folders of adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from titan_rl.core.errors import ModelError
from titan_rl.training.models.peft_settings import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    check_same_settings,
    hf_name,
    read_adapter_config,
)
from titan_rl.training.settings import AdapterConfig
from titan_rl.training.state.checkpoint import atomic_directory
from titan_rl.training.state.train_state import write_tensors


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
    """Read the matrices of the folder `training.adapter.start`, by their Hugging Face names.

    Args:
        shapes: Shapes of the matrices that the model needs, by their Hugging Face names.

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
    if strange := sorted(found.keys() - shapes.keys()):
        raise ModelError(
            f"{where} has {strange[0]} and {len(strange) - 1} more, which training.adapter.targets does not name; "
            "set targets to the layers of the folder, unless that is an adapter of another model"
        )
    if missing := sorted(shapes.keys() - found.keys()):
        raise ModelError(
            f"{where} lacks {missing[0]} and {len(missing) - 1} more; set training.adapter.targets to the layers of "
            "the folder, unless that is an adapter of another model"
        )
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            raise ModelError(f"{where}: {name} has shape {tuple(found[name].shape)}; this model needs {shape}")
        if not found[name].isfinite().all():
            raise ModelError(f"{where}: {name} has values that are not finite; export the adapter of an earlier step")
    return found
