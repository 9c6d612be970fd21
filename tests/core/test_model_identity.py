"""`model_identity`: detects that a folder no longer holds the model a run started from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from titan_rl.core.errors import ModelError
from titan_rl.core.model_identity import changed_parts, model_identity
from titan_rl.training.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, texts=[], level="byte", parameters=900_000)
    return folder


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_copy_is_the_same_model_however_its_weights_are_sharded(model: Path) -> None:
    identity = model_identity(model)
    assert set(identity) == {"weights", "config", "tokenizer", "chat_template"}
    weights = weights_of(model)
    names = list(weights)
    (model / "model.safetensors").unlink()
    save_file({name: weights[name] for name in names[::2]}, model / "b.safetensors", {"format": "pt"})
    save_file({name: weights[name] for name in names[1::2]}, model / "a.safetensors")
    assert changed_parts(model, identity) == []


def test_changed_weights_are_detected_in_every_tensor(model: Path) -> None:
    identity, weights = model_identity(model), weights_of(model)
    for name in weights:
        trained = weights | {name: weights[name] + 1e-3}
        save_file(trained, model / "model.safetensors")
        assert changed_parts(model, identity) == ["weights"], name


def test_sparse_bfloat16_update_is_detected(model: Path) -> None:
    """At a small learning rate most numbers round back to their old value."""
    weights = {name: tensor.bfloat16() for name, tensor in weights_of(model).items()}
    save_file(weights, model / "model.safetensors")
    identity = model_identity(model)
    generator = torch.Generator().manual_seed(0)
    stepped = {
        name: (tensor.float() + 1e-6 * torch.randn(tensor.shape, generator=generator).sign()).bfloat16()
        for name, tensor in weights.items()
    }
    moved = sum(int((stepped[name] != weights[name]).sum()) for name in weights)
    assert 0 < moved < 0.02 * sum(tensor.numel() for tensor in weights.values())
    save_file(stepped, model / "model.safetensors")
    assert changed_parts(model, identity) == ["weights"]


def test_large_tensor_is_sampled_at_its_ends_and_between(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20)
    save_file({"large": tensor}, tmp_path / "model.safetensors")
    identity = model_identity(tmp_path)
    for at in (0, -1, (tensor.numel() - 1024) // 15 + 1):
        changed = tensor.clone()
        changed[at] = 1.0
        save_file({"large": changed}, tmp_path / "model.safetensors")
        assert changed_parts(tmp_path, identity) == ["weights"], at


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("config.json", "config"),
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat template"),
        ("additional_chat_templates/tools.jinja", "chat template"),
    ],
)
def test_changed_files_other_than_weights_are_named(model: Path, file: str, part: str) -> None:
    identity = model_identity(model)
    (model / file).parent.mkdir(exist_ok=True)
    with (model / file).open("a") as text:
        text.write(" ")
    assert changed_parts(model, identity) == [part]


def test_chat_template_in_tokenizer_config_is_its_own_part(model: Path) -> None:
    identity, file = model_identity(model), model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(dict(reversed(settings.items()))))
    assert changed_parts(model, identity) == []
    file.write_text(json.dumps(settings | {"chat_template": "{{ messages }}"}))
    assert changed_parts(model, identity) == ["chat template"]
    file.write_text(json.dumps(settings | {"eos_token": "<other>"}))
    assert changed_parts(model, identity) == ["tokenizer"]


def test_missing_folder_or_identity_reports_no_change(model: Path, tmp_path: Path) -> None:
    assert model_identity(tmp_path / "nowhere") == {}
    assert changed_parts(tmp_path / "nowhere", model_identity(model)) == []
    assert changed_parts(model, {}) == []


def test_truncated_weights_are_an_error(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="damaged"):
        model_identity(model)
