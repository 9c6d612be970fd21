"""Recurrent families: packed sequences are independent, and layers that are not divided into documents are detected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from models.families import make_family
from models.steps import make

from titan_rl.core.errors import ModelError
from titan_rl.training import family_check
from titan_rl.training.choices import Attention, DType
from titan_rl.training.family_check import check_family, draw_sequences, leakage, packing_error
from titan_rl.training.models import families, recurrent, transformers_decoder
from titan_rl.training.parallel import World
from titan_rl.training.policy import Policy
from titan_rl.training.settings import ModelConfig, TrainingConfig

TOLERANCE = 2e-5


@pytest.fixture(params=["qwen3_next", "lfm2", "mamba2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_family(request.param, tmp_path / "model")


@pytest.fixture
def lfm2(tmp_path: Path) -> Path:
    return make_family("lfm2", tmp_path / "model")


def policy_of(folder: Path, *, dtype: DType = "float32", attention: Attention = "auto") -> Policy:
    model = ModelConfig(path=str(folder), max_context=128, dtype=dtype)
    return Policy(model, TrainingConfig(row_tokens=512, attention=attention), World())


def test_packed_sequences_match_separate_sequences(folder: Path) -> None:
    policy = policy_of(folder)
    sequences = draw_sequences(40, 17, 64, 33)
    together = policy.score(sequences)
    for found, sequence in zip(together, sequences, strict=True):
        (alone,) = policy.score([sequence])
        assert found == pytest.approx(alone, abs=TOLERANCE)
    assert leakage(policy) < TOLERANCE
    error, frozen = packing_error(policy)  # includes sequences that share a prompt
    assert error < 1e-4
    assert not frozen


def test_recurrent_layers_are_divided_with_flex_attention(lfm2: Path) -> None:
    error, _ = packing_error(policy_of(lfm2, attention="flex"))
    assert error < 1e-4


def test_check_detects_undivided_recurrent_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_decoder, "divide_mixers", lambda *_: None)
    logprobs, leaked, gradients = check_family(folder)
    assert leaked.difference > 10 * leaked.tolerance
    assert not logprobs.holds
    assert not gradients.holds


def test_untested_family_that_leaks_is_rejected_before_training(lfm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_check, "PROVED", frozenset[str]())
    make(lfm2)
    monkeypatch.setattr(transformers_decoder, "divide_mixers", lambda *_: None)
    with pytest.raises(
        ModelError, match=r"model_type 'lfm2', which cannot be trained: the check of a tiny model failed"
    ):
        make(lfm2)


def test_unknown_recurrent_module_is_rejected_by_name(lfm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "RECURRENT", {"lfm2": "AnotherName"})
    with pytest.raises(ModelError, match=r"model\.layers\.0\.conv\.conv of model_type 'lfm2', a Conv1d"):
        policy_of(lfm2)
    monkeypatch.setattr(families, "RECURRENT", dict[str, str]())
    with pytest.raises(ModelError, match=r"layers of type 'conv' have a recurrent state, and titan_rl does not know"):
        policy_of(lfm2)


def test_rejects_per_token_arguments_that_are_not_divided(lfm2: Path) -> None:
    name = families.RECURRENT["lfm2"]
    mixer: Any = next(module for module in policy_of(lfm2).model.modules() if type(module).__name__ == name)
    with pytest.raises(ModelError, match="passes attention_mask to Lfm2ShortConv, which the library does not divide"):
        mixer(torch.zeros(1, 4, 256), attention_mask=torch.ones(1, 4))


def test_published_scores_use_rounded_convolutions(lfm2: Path) -> None:
    policy = policy_of(lfm2, dtype="bfloat16")
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(parameter.bfloat16() if ".conv.conv." not in name else parameter)
    sequences = draw_sequences(40)
    with policy.as_published():
        (found,) = policy.score(sequences)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
    with policy.as_published():
        (expected,) = policy.score(sequences)
    assert found == expected
