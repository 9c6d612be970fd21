"""`training.adapter.start`: checks of the folder of an adapter, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft_files import BASE, matrices, write_adapter

from titan_rl.config.load import load_config
from titan_rl.config.run import RunConfig
from titan_rl.core.errors import ConfigError, ModelError

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def load(start: Path | str, **settings: str) -> RunConfig:
    overrides = {"training.adapter.rank": "2", "training.adapter.start": str(start), "model.path": str(BASE)}
    overrides |= {key.replace("__", "."): value for key, value in settings.items()}
    return load_config("examples/alphabet_sort/lora.toml", list(overrides.items()))


def test_valid_folder_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "adapter")
    assert load(folder).training.adapter.start == str(folder)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"use_dora": True}, "has use_dora True, which is not supported; merge the adapter with PEFT"),
        ({"use_rslora": True}, "has use_rslora True, which is not supported"),
        ({"bias": "all"}, "has bias 'all'; only 'none' is supported"),
        ({"alora_invocation_tokens": [3, 4]}, r"has alora_invocation_tokens \[3, 4\], which is not supported"),
        ({"lora_bias": True}, "has lora_bias True"),
        ({"fan_in_fan_out": True}, "has fan_in_fan_out True"),
        ({"option_of_next_year": 1}, "has option_of_next_year 1, which is not supported"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa', which changes the weights of the base"),
        ({"init_lora_weights": "pissa_niter_16"}, "has init_lora_weights 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "has init_lora_weights 'olora'"),
        ({"init_lora_weights": "loftq"}, "has init_lora_weights 'loftq'"),
        ({"peft_type": "IA3"}, "has peft_type 'IA3'; only 'LORA' is supported"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern {'q_proj': 4}, which is not supported"),
        ({"r": 4}, "has r 4, and training.adapter.rank is 2; set it to that of the folder"),
        ({"lora_alpha": 16}, "has lora_alpha 16, and training.adapter.alpha is 32"),
    ],
)
def test_unsupported_adapter_config_is_rejected(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    folder = write_adapter(tmp_path / "adapter", **config)
    with pytest.raises(ModelError, match=f"^training.adapter.start = '{folder}'.* ?{problem}"):
        load(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "peft_version": "0.21.2"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
    ],
)
def test_folder_whose_options_leave_the_computation_unchanged_is_accepted(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path / "adapter", **config)
    assert load(folder).training.adapter.start == str(folder)


def test_damaged_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config.json; name a folder"):
        load(BASE)
    folder = write_adapter(tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"but its header describes .* it is damaged"):
        load(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors cannot be read: No such file"):
        load(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({f"{FIRST}.lora_A.weight": [2, 64]}, r"q_proj.lora_A.weight has shape \(2, 64\), and a layer of .* needs"),
        ({f"{FIRST}.lora_A.weight": None}, "has only one of the two matrices of model.layers.0.self_attn.q_proj"),
        (
            {f"{FIRST}.lora_A.weight": None, f"{FIRST}.lora_B.weight": None},
            "lacks model.layers.0.self_attn.q_proj and 0 more",
        ),
        ({"base_model.model.head.lora_A.weight": [2, 8]}, "has head.lora_A.weight, and .* has no such layer"),
    ],
)
def test_matrices_that_do_not_match_the_model_are_rejected(
    tmp_path: Path, changed: dict[str, list[int] | None], problem: str
) -> None:
    shapes = {name: shape for name, shape in (matrices() | changed).items() if shape is not None}
    with pytest.raises(ModelError, match=problem):
        load(write_adapter(tmp_path / "adapter", shapes))


def test_layers_outside_the_targets_are_rejected(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"which training.adapter.targets does not name"):
        load(folder, training__adapter__targets='["q_proj", "v_proj", "k_proj"]')


def test_torchtitan_model_needs_both_key_and_value_targets(tmp_path: Path) -> None:
    settings = [("training.adapter.targets", '["q_proj", "v_proj"]'), ("model.path", str(BASE))]
    with pytest.raises(ConfigError, match=r"training.adapter.targets has one of k_proj and v_proj"):
        load_config("examples/alphabet_sort/lora.toml", settings)


def test_adapters_table_start_folder_is_resolved_next_to_the_file(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "start")
    toml = tmp_path / "run.toml"
    toml.write_text(f"""
    model.path = "{BASE}"
    model.max_context = 256
    generation.kv_cache_gib = 0.5
    training.row_tokens = 1024
    training.adapter.rank = 2
    tasks = [{{ name = "sort", type = "examples.alphabet_sort.task:AlphabetSort" }}]
    [[adapters]]
    name = "fresh"
    tasks = ["sort"]
    [[adapters]]
    name = "further"
    tasks = ["sort"]
    training.adapter.start = "start"
    """)
    fresh, further = load_config(toml).experiments.values()
    assert (fresh.training.adapter.start, further.training.adapter.start) == (None, str(folder))
    with pytest.raises(ConfigError, match=r"^adapters.further.training.adapter.start = 'gone' is not a folder here or"):
        load_config(toml, [("adapters.further.training.adapter.start", "gone")])
