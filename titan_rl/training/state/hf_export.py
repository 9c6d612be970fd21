"""Writes weights as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from titan_rl.core.calls.parsing import parse_json
from titan_rl.training.settings import MADE_BY_SFT
from titan_rl.training.state.checkpoint import atomic_directory
from titan_rl.training.state.tensor_file import write_tensors

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def export_hf(
    directory: Path,
    layout: Mapping[str, torch.Tensor],
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source: Path,
    dtype: str,
    chat_template: str | None = None,
) -> None:
    """Write `named_tensors` beside the config, tokenizer and chat template of `source`, one at a time. All or nothing.

    Args:
        layout: as of `write_tensors`.
        named_tensors: Hugging Face names.
        source: the folder the model came from; every file of it that holds no weights is copied, but for the note
            `MADE_BY_SFT`: what is exported is not `titan-rl sft`'s to replace.
        dtype: recorded in config.json, so that readers load the weights as they are: "float32".
        chat_template: in the place of that of `source`.

    Raises:
        NoSpaceError: the disk is full.
        CheckpointError: it could not be written; what was at `directory` is unchanged.
    """
    with atomic_directory(directory) as temporary:
        for file in source.iterdir():
            if file.is_file() and file.name != MADE_BY_SFT and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, temporary / file.name)
        config: dict[str, Any] = parse_json((source / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if chat_template is not None:
            _replace_template(temporary, chat_template)
        write_tensors(temporary / "model.safetensors", layout, named_tensors, {"format": "pt"})


def _replace_template(folder: Path, template: str) -> None:
    """Older folders have their template in the tokenizer's config, and some readers look there first."""
    (folder / "chat_template.jinja").write_text(template)
    if (path := folder / "tokenizer_config.json").is_file():
        config: dict[str, Any] = parse_json(path.read_text())
        if config.pop("chat_template", None) is not None:
            path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
