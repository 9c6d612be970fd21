"""Check of an adapter's folder in PEFT's format against a model, without loading either."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.model_files import read_header
from titan_rl.core.errors import ModelError
from titan_rl.training.models.peft_settings import WEIGHTS, hf_name
from titan_rl.training.settings import TARGETS, AdapterConfig


def check_adapter_weights(folder: Path, model: Path, rank: int, where: str, trained: AdapterConfig | None) -> None:
    """Check the names and shapes of an adapter's matrices against the layers of a model.

    Args:
        model: Hugging Face folder of the base model, which has been checked.
        rank: Rank of the adapter.
        where: Beginning of error messages, such as the setting that names the folder.
        trained: Settings with which the adapter is trained further; it must then have exactly the layers that they
            name. None if it is not trained.

    Raises:
        ModelError: The file with the matrices is missing or damaged, or its matrices do not fit the model.
    """
    try:
        header = read_header(folder / WEIGHTS)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    found = {hf_name(name): tuple(shape) for name, (shape, _) in header.items()}
    base = {name: shape for path in model.glob("*.safetensors") for name, (shape, _) in read_header(path).items()}
    layers: dict[str, int] = {}
    for name, shape in found.items():
        layer, _, half = name.rpartition(".lora_")
        weight = base.get(f"{layer}.weight", ())
        if half not in ("A.weight", "B.weight") or len(weight) != 2:
            raise ModelError(f"{where} has {name}, and {model} has no such layer; is it an adapter of another model?")
        expected = (rank, weight[1]) if half == "A.weight" else (weight[0], rank)
        if shape != expected:
            raise ModelError(
                f"{where}: {name} has shape {shape}, and a layer of {model} needs {expected}; is it an adapter of "
                "another model?"
            )
        layers[layer] = layers.get(layer, 0) + 1
    if torn := next((layer for layer, count in layers.items() if count == 1), None):
        raise ModelError(f"{where} has only one of the two matrices of {torn}; export the adapter again")
    if trained is not None:
        _check_layers(set(layers), base, trained, where)


def _check_layers(layers: set[str], base: Mapping[str, Any], trained: AdapterConfig, where: str) -> None:
    targets = trained.targets or TARGETS
    if strange := sorted(layer for layer in layers if layer.rpartition(".")[2] not in targets):
        raise ModelError(
            f"{where} has {strange[0]} and {len(strange) - 1} more, which training.adapter.targets does not name; set "
            "targets to the layers of the folder"
        )
    needed = {name.removesuffix(".weight") for name in base if name.endswith(".weight") and "expert" not in name}
    missing = sorted(layer for layer in needed - layers if layer.rpartition(".")[2] in targets)
    if missing:
        raise ModelError(
            f"{where} lacks {missing[0]} and {len(missing) - 1} more; set training.adapter.targets to the layers of "
            "the folder, or export the adapter again"
        )
