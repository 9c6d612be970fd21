"""Tensors of a folder that the model does not have: masks of old folders, and layers that predict further tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from e2e.tiny_policy import on_policy_samples
from models.families import make_family
from models.steps import make
from safetensors.torch import load_file, save_file

from titan_rl.config.load import load_config
from titan_rl.core.errors import ModelError
from titan_rl.run.checks.requirements import check_policy
from titan_rl.training.export import export_checkpoint
from titan_rl.training.settings import ModelConfig


def with_tensors(name: str, folder: Path, *names: str, **config: int) -> Path:
    """Make a model of a family, and add tensors and entries of config.json to its folder."""
    make_family(name, folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {each: torch.randn(2, 3).to(torch.bfloat16 if "mtp" in each else torch.float32) for each in names}
    save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


CASES = {
    "gpt2": ("gpt2", ("transformer.h.0.attn.masked_bias", "transformer.h.1.attn.bias"), {}),
    "glm4_moe": ("glm4_moe", ("model.layers.2.eh_proj.weight",), {"num_nextn_predict_layers": 1}),
    "qwen2": ("qwen2", ("mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_untrained_tensors_are_named_and_kept_by_exports(case: str, tmp_path: Path) -> None:
    family, names, config = CASES[case]
    folder = with_tensors(family, tmp_path / "model", *names, **config)
    kept = [name for name in names if "inv_freq" not in name]
    model = ModelConfig(path=str(folder), max_context=64)
    note = check_policy(load_config("examples/alphabet_sort/cpu.toml").model_copy(update={"model": model}))
    assert note is not None
    assert note.endswith(f"has tensors that are not trained, and exports keep them as they are: {', '.join(kept)}")

    trainer = make(folder)
    trainer.step(on_policy_samples(trainer, 40, 33))
    trainer.save(tmp_path / "step-000001")
    trainer.export_hf(tmp_path / "export")
    export_checkpoint(folder, tmp_path / "step-000001", tmp_path / "again")
    source = load_file(folder / "model.safetensors")
    for export in ("export", "again"):
        exported = load_file(tmp_path / export / "model.safetensors")
        assert exported.keys() == source.keys() - {name for name in names if name not in kept}
        assert all(torch.equal(exported[name], source[name]) for name in kept)


@pytest.mark.parametrize("name", ["model.layers.2.eh_proj.weight", "model.layers.0.self_attn.q_norm.weight"])
def test_tensor_that_the_config_does_not_describe_is_refused(name: str, tmp_path: Path) -> None:
    folder = with_tensors("qwen2", tmp_path / "model", name)
    with pytest.raises(ModelError, match=rf"has '{name}', which config.json does not describe"):
        make(folder)
