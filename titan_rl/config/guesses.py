"""What `generation.speculative` names, and whether it can guess for the policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_rl.config.model_files import check_weights, read_header, read_json
from titan_rl.config.speculative import SpeculativeConfig
from titan_rl.core.errors import ConfigError

MTP_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "mtp_config")
"""What the config of a model with heads for several tokens calls the number of them."""


def check_guesses(guesses: SpeculativeConfig, architecture: Mapping[str, Any]) -> None:
    """
    Args:
        architecture: config.json of the policy.

    Raises:
        ModelError: a file is missing or unreadable of what guesses.
        ConfigError: there is no such folder, or what is in it cannot guess for the policy.
    """
    if guesses.method == "mtp" and not any(architecture.get(name) for name in MTP_COUNTS):
        raise ConfigError(
            'generation.speculative.method = "mtp" guesses with heads of the policy, and its config.json has none of '
            f'{", ".join(MTP_COUNTS)}; set it to "ngram", or to "draft_model" or "eagle" with a model'
        )
    if guesses.model is None:
        return
    folder, shown = Path(guesses.model), f"generation.speculative.model = {guesses.model!r}"
    if not folder.is_dir():
        raise ConfigError(
            f"{shown} is not a folder; name that of the model which guesses, such "
            'as after hf download ORGANIZATION/NAME --local-dir FOLDER, or set generation.speculative.method = "ngram"'
        )
    drafter = read_json(folder, "config.json")
    if guesses.method == "draft_model":
        check_weights(folder)
        _check_vocabulary(shown, drafter, architecture)
    else:
        _check_heads(shown, folder, guesses.method)


def _check_vocabulary(shown: str, drafter: Mapping[str, Any], architecture: Mapping[str, Any]) -> None:
    own, policy = drafter.get("vocab_size"), architecture.get("vocab_size")
    if own != policy:
        raise ConfigError(
            f"{shown} has vocab_size = {own} in its config.json, and the policy {policy}: vLLM takes guesses of the "
            "policy's own vocabulary alone; name a smaller model of the same family"
        )


def _check_heads(shown: str, folder: Path, method: str) -> None:
    """Heads join a token with the policy's state by a matrix that vLLM knows as fc; a model of its own has none."""
    files = list(folder.glob("*.safetensors"))
    if files and not any(f".{name}".endswith(".fc.weight") for path in files for name in read_header(path)):
        raise ConfigError(
            f"{shown} has no tensor fc.weight, as heads of {method} do; name a folder of such heads, or set "
            'generation.speculative.method = "draft_model" where it is a model of its own'
        )
