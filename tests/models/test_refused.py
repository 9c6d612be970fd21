"""Families that no test knows are tried with a tiny model, and refused if their numbers are others'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from e2e.tiny_policy import on_policy_samples
from models.steps import make
from transformers import AutoConfig

from titan_rl.core.errors import ModelError
from titan_rl.training.models.tiny import make_tiny, tiny_config

pytestmark = pytest.mark.slow


def write(model_type: str, folder: Path) -> Path:
    make_tiny(tiny_config(AutoConfig.for_model(model_type)), folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_a_family_whose_positions_pass_from_one_sequence_to_the_next_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'biogpt', which cannot be trained: .* gradients of packed"):
        make(write("biogpt", tmp_path / "model"))


def test_an_attention_with_unknown_arguments_is_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="DogeAttention of transformers passes attention_mask to its attention"):
        make(write("doge", tmp_path / "model"))


def test_an_untried_family_trains_if_its_numbers_are_right(tmp_path: Path) -> None:
    trainer = make(write("persimmon", tmp_path / "model"))
    assert trainer.step(on_policy_samples(trainer, 40, 33)).metrics["grad_norm"] > 0


def test_long_contexts_of_longrope_are_refused(tmp_path: Path) -> None:
    folder = write("phi3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"original_max_position_embeddings": 64, "rope_parameters": rope})
    )
    with pytest.raises(ModelError, match="'longrope', which turns tokens of sequences longer than 64"):
        make(folder)
