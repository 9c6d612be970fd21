"""Untested families are checked with a tiny model and rejected if its results are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import on_policy_samples
from models.steps import make
from transformers import AutoConfig

from titan_rl.core.errors import ModelError
from titan_rl.training.family_check import (
    check_family,
    draw_sequences,
    eager_logprobs,
    logprob_tolerance,
    rounding_error,
)
from titan_rl.training.models.shrunken_models import make_tiny, tiny_config
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig

pytestmark = pytest.mark.slow


def write(model_type: str, folder: Path) -> Path:
    make_tiny(tiny_config(AutoConfig.for_model(model_type)), folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_accepts_family_with_gradients_of_rounding_error_only(tmp_path: Path) -> None:
    trainer = make(write("biogpt", tmp_path / "model"))  # key biases do not affect attention
    assert trainer.step(on_policy_samples(trainer, 40, 33)).metrics["grad_norm"] > 0


def test_rejects_attention_with_unknown_arguments(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="DogeAttention of transformers passes attention_mask to its attention"):
        make(write("doge", tmp_path / "model"))


def test_untested_family_trains_if_the_check_passes(tmp_path: Path) -> None:
    trainer = make(write("persimmon", tmp_path / "model"))
    assert trainer.step(on_policy_samples(trainer, 40, 33)).metrics["grad_norm"] > 0


def test_tolerance_follows_the_rounding_error_of_the_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write("minicpm3", tmp_path / "model")  # it scales embeddings and residuals
    sequences = draw_sequences(40, 17, 33)
    assert rounding_error(folder, sequences) > 2e-5
    logprobs, *_ = check_family(folder)
    assert 2e-5 < logprobs.difference <= logprobs.tolerance <= 2e-4
    monkeypatch.setattr("titan_rl.training.family_check.rounding_error", lambda *_: 1.0)
    assert logprob_tolerance(folder, sequences, 2e-5) == pytest.approx(2e-4)


def longrope(folder: Path, short: int) -> Path:
    """A tiny Phi-3 with two sets of frequencies: for sequences of up to `short` tokens, and for longer ones."""
    write("phi3", folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": short,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"original_max_position_embeddings": short, "rope_parameters": rope})
    )
    return folder


def test_rejects_long_contexts_of_longrope(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'longrope', which rotates tokens of sequences longer than 64"):
        make(longrope(tmp_path / "model", 64))


def test_rows_may_exceed_the_longrope_context(tmp_path: Path) -> None:
    folder = longrope(tmp_path / "model", 64)
    model = ModelConfig(path=str(folder), max_context=64)
    policy = Policy(model, TrainingConfig(row_tokens=256, attention="document"), World())
    found = policy.score(sequences := draw_sequences(60, 17, 63, 33))
    for mine, theirs in zip(found, eager_logprobs(folder, sequences), strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), theirs, rtol=0, atol=2e-5)
