"""Writes adapter folders in PEFT's format for the model of an example, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.model_files import read_header
from titan_rl.training.models.peft_settings import PREFIX
from titan_rl.training.settings import TARGETS

BASE = Path(__file__).parents[1] / "examples" / "alphabet_sort" / "base"


def matrices(rank: int = 2, base: Path = BASE) -> dict[str, list[int]]:
    """Shapes of the matrices of an adapter of all layers, by PEFT's names."""
    shapes: dict[str, list[int]] = {}
    for name, (shape, _) in read_header(base / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in TARGETS:
            shapes[f"{PREFIX}{layer}.lora_A.weight"] = [rank, shape[1]]
            shapes[f"{PREFIX}{layer}.lora_B.weight"] = [shape[0], rank]
    return shapes


def write_adapter(folder: Path, shapes: Mapping[str, list[int]] | None = None, **config: Any) -> Path:
    """Write an adapter of rank 2 whose matrices are zeros.

    Args:
        shapes: Replaces `matrices`.
        config: Entries of adapter_config.json to change.
    """
    folder.mkdir(parents=True)
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 32,
        "target_modules": list(TARGETS),
        "base_model_name_or_path": str(BASE),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    header, end = dict[str, Any](), 0
    for name, shape in (matrices() if shapes is None else shapes).items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return folder
