"""Settings of adapters in folders in PEFT's format, and the names in the folders' files. Imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.errors import ModelError
from titan_rl.core.model_identity import read_header
from titan_rl.training.settings import AdapterConfig

PREFIX = "base_model.model."
"""Beginning of every name in PEFT's files."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_MUST_BE = {"peft_type": "LORA", "bias": "none"}
_OPTIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_WITHOUT_EFFECT = frozenset(chain.from_iterable(_OPTIONS["without_effect"].values()))
"""Options of PEFT that do not change what an adapter computes from its matrices. No other may be set."""

_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base's weights as they are. The others, such as PiSSA, subtract the
initial B A from them, so that the adapter belongs to a base that exists only in memory."""


def read_adapter_config(folder: Path, where: str) -> dict[str, Any]:
    """Read adapter_config.json.

    Args:
        where: Beginning of error messages, such as the setting that names the folder.

    Raises:
        ModelError: The file does not exist, it is not JSON, or it describes an unsupported kind of adapter.
    """
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{where} has no {CONFIG}; name a folder that titan-rl export --adapter or PEFT has written")
    try:
        config: dict[str, Any] = parse_json((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: {CONFIG} cannot be read: {error}") from error
    for name, expected in _MUST_BE.items():
        if config.get(name, expected) != expected:
            raise ModelError(f"{where} has {name} {config[name]!r}; only {expected!r} is supported")
    if (init := config.get("init_lora_weights", True)) not in _KEEP_THE_BASE:
        raise ModelError(
            f"{where} has init_lora_weights {init!r}, which changes the weights of the base, so that the matrices "
            "alone do not describe the policy; convert it with path_initial_model_for_weight_conversion of PEFT's "
            "save_pretrained, or merge it with PEFT and name the merged model in model.path"
        )
    for name, value in config.items():
        if value and name not in _MUST_BE and name not in _WITHOUT_EFFECT:
            raise ModelError(
                f"{where} has {name} {value!r}, which is not supported; merge the adapter with PEFT and name the "
                "merged model in model.path"
            )
    return config


def peft_settings(folder: Path, where: str | None = None) -> AdapterConfig:
    """Settings that train the adapter of a folder in PEFT's format further, starting from that folder.

    The targets are the layers that have matrices, because target_modules may also be "all-linear" or a pattern.

    Args:
        where: Beginning of error messages; by default, the folder.

    Raises:
        ModelError: The folder has no readable adapter_config.json or matrices, or its adapter is of an unsupported
            kind.
    """
    where = where or str(folder)
    config = read_adapter_config(folder, where)
    try:
        layers = {hf_name(name).rpartition(".lora_")[0] for name in read_header(folder / WEIGHTS)}
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from None
    targets = sorted({layer.rpartition(".")[2] for layer in layers})
    try:
        return AdapterConfig(
            rank=config.get("r", 0), alpha=config.get("lora_alpha", 0), targets=tuple(targets), start=str(folder)
        )
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ModelError(f"{where}: {folder / CONFIG}: {problem}") from error


def check_same_settings(config: Mapping[str, Any], adapter: AdapterConfig, where: str) -> None:
    """Compare rank and alpha of a folder's adapter_config.json with the settings of an adapter that starts from the
    folder.

    Raises:
        ModelError: Rank or alpha differ.
    """
    for name, setting, expected in (("r", "rank", adapter.rank), ("lora_alpha", "alpha", adapter.alpha)):
        if config.get(name) != expected:
            raise ModelError(
                f"{where} has {name} {config.get(name)}, and training.adapter.{setting} is {expected:g}; set it to "
                "that of the folder"
            )


def hf_name(name: str) -> str:
    """Hugging Face name of a matrix in PEFT's file.

    Example: "model.layers.0.mlp.up_proj.lora_A.weight" for
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    """
    return name.removeprefix(PREFIX).replace(".default.weight", ".weight")
