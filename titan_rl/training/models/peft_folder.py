"""Folders of adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.training.settings import AdapterConfig
from titan_rl.training.state.checkpoint import atomic_directory

PREFIX = "base_model.model."
"""Beginning of every name in PEFT's files."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MUST_BE = {"use_dora": False, "bias": "none", "modules_to_save": None, "use_rslora": False, "peft_type": "LORA"}
_MUST_BE_EMPTY = ("rank_pattern", "alpha_pattern")


def write_peft(
    directory: Path, tensors: Mapping[str, torch.Tensor], settings: AdapterConfig, *, base: str, targets: list[str]
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads, all or nothing.

    Args:
        tensors: by their Hugging Face names without PEFT's prefix.
        base: folder of the model that the adapter changes.
        targets: last parts of the names of the changed layers.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: it could not be written; `directory` is unchanged.
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
        save_file(
            {f"{PREFIX}{name}": tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary / WEIGHTS
        )


def peft_settings(folder: Path) -> AdapterConfig:
    """Settings of the adapter in a folder in PEFT's format, which start from that folder.

    Raises:
        ModelError: it has no readable adapter_config.json, or is of a kind of adapter that is not supported.
    """
    config = _config_of(folder, str(folder))
    if not isinstance(targets := config.get("target_modules"), list):
        raise ModelError(f"{folder} has target_modules {targets!r}; only a list of names of layers is supported")
    try:
        return AdapterConfig(
            rank=config.get("r", 0), alpha=config.get("lora_alpha", 0), targets=tuple(targets), start=str(folder)
        )
    except ValidationError as error:
        raise ModelError(f"{folder} / {CONFIG}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error


def read_peft(folder: Path, settings: AdapterConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Matrices of the folder `training.adapter.start`, by their Hugging Face names.

    Args:
        shapes: of the matrices that the model needs.

    Raises:
        ModelError: the folder lacks a file, or is of another kind of adapter, rank, alpha or layers.
    """
    where = f"training.adapter.start = {str(folder)!r}"
    config = _config_of(folder, where)
    given = {"r": settings.rank, "lora_alpha": settings.alpha}
    for name, expected in given.items():
        if config.get(name) != expected:
            setting = {"r": "rank", "lora_alpha": "alpha"}[name]
            raise ModelError(
                f"{where} has {name} {config.get(name)}, and training.adapter.{setting} is {expected:g}; set it to "
                "that of the folder"
            )
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{where}: {WEIGHTS} cannot be read: {error}") from error
    found = {name.removeprefix(PREFIX).replace(".default.weight", ".weight"): each for name, each in tensors.items()}
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
    return found


def _config_of(folder: Path, where: str) -> dict[str, Any]:
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_text())
    except FileNotFoundError:
        raise ModelError(f"{where} has no {CONFIG}; it must be a folder in PEFT's format") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: {CONFIG} is not valid JSON: {error}") from error
    for name, expected in _MUST_BE.items():
        if config.get(name, expected) != expected:
            raise ModelError(f"{where} has {name} {config[name]!r}; only {expected!r} is supported")
    if other := next((name for name in _MUST_BE_EMPTY if config.get(name)), None):
        raise ModelError(f"{where} has {other}; layers with ranks of their own are not supported")
    return config
