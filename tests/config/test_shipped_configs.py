from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_rl.config.concurrency import Concurrency, throttles
from titan_rl.config.load import dump_config, load_config
from titan_rl.training.tiny_model.folder import fitting_shape

ARCHITECTURES = {
    "qwen3_0_6b": {
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
    }
}
"""config.json of models that must be downloaded first."""


def tiny(parameters: int) -> dict[str, int]:
    """config.json of the model that `titan-rl sft` creates."""
    shape = fitting_shape(parameters, vocab_size=400)
    return {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.width,
    }


ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "examples").glob("*/*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_config_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path, check_files=False)
    again = tmp_path / "resolved.toml"
    again.write_text(dump_config(config))

    assert load_config(again, check_files=False) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_shipped_config_throttles_its_rollouts(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path, check_files=False)
    if not Path(config.model.path).is_dir():
        architecture = ARCHITECTURES.get(path.stem) or tiny(config.sft.tiny_model.parameters)
        (tmp_path / "config.json").write_text(json.dumps(architecture))
        config = load_config(path, [("model.path", str(tmp_path))], check_files=False)
    sized = Concurrency.of(config)
    assert list(throttles(config)) == []
    assert sized.held is not None
    assert sized.max_running * config.generation.num_generators >= sized.in_flight
