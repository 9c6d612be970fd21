"""Shape formulas of dense models, compared with torchtitan: every accepted folder can be built."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import numpy as np
from safetensors.numpy import save_file

from titan_rl.config.dense_shapes import HEAD_NORMS, expected_shapes, is_known_to_fit
from titan_rl.core.errors import ModelError
from titan_rl.training.models.hf_model import HFModel
from titan_rl.training.parallel import World
from titan_rl.training.settings import ModelConfig

CONTEXT = 64


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 31,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        **fields,
    }
    return {name: value for name, value in config.items() if value != "absent"}


def write(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(shapes)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: np.zeros(shapes[name], np.float32) for name in part}, folder / f"part-{number}.safetensors")


def is_accepted(folder: Path) -> bool:
    return is_known_to_fit(ModelConfig(path=str(folder), max_context=CONTEXT))


def problem(folder: Path) -> str | None:
    """Why the policy cannot be built."""
    try:
        HFModel(folder, World(), max_context=CONTEXT)
    except Exception as error:  # a family's code may raise anything
        return f"{type(error).__name__}: {error}"
    return None


@settings(max_examples=examples(80), deadline=None)
@given(
    st.sampled_from(sorted(HEAD_NORMS)),
    st.fixed_dictionaries(
        {},
        optional={
            "hidden_size": st.sampled_from([1, 6, 16]),
            "intermediate_size": st.sampled_from([1, 5, 24]),
            "num_hidden_layers": st.sampled_from([1, 3]),
            "num_attention_heads": st.sampled_from([1, 3, 4]),
            "num_key_value_heads": st.sampled_from([1, 2]),
            "head_dim": st.sampled_from(["absent", None, 2, 3, 8]),
            "vocab_size": st.sampled_from([1, 31]),
            "rms_norm_eps": st.sampled_from([1e-6, 1, 0, "1e-6", "absent"]),
            "tie_word_embeddings": st.sampled_from([True, "absent", None]),
            "max_position_embeddings": st.sampled_from([CONTEXT - 1, 4 * CONTEXT, "absent", "64"]),
            "rope_theta": st.sampled_from([5e5, "large"]),
            "rope_parameters": st.sampled_from(
                [
                    None,
                    {},
                    {"rope_theta": "large"},
                    {"type": "default"},
                    {"rope_type": "yarn", "factor": 2.0},
                    {"rope_type": "default", "partial_rotary_factor": 0.5},
                    [],
                ]
            ),
            "attention_bias": st.sampled_from([False, True]),
        },
    ),
)
def test_folder_accepted_by_the_formulas_can_be_built(family: str, fields: dict[str, Any]) -> None:
    config = config_of(family, **fields)
    with TemporaryDirectory() as folder:
        write(Path(folder), config, expected_shapes(config, CONTEXT) or {"model.norm.weight": (16,)})
        assert not is_accepted(Path(folder)) or problem(Path(folder)) is None


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", sorted(HEAD_NORMS))
def test_formulas_accept_exactly_the_tensors_of_the_model(tmp_path: Path, family: str, is_tied: bool) -> None:
    config = config_of(family, tie_word_embeddings=is_tied)
    shapes = expected_shapes(config, CONTEXT)
    assert shapes is not None

    def accepted(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
        folder = tmp_path / name
        folder.mkdir()
        write(folder, config, shapes)
        assert is_accepted(folder) == (problem(folder) is None), problem(folder)
        return is_accepted(folder)

    assert accepted("whole", shapes)
    assert accepted("tied", {**shapes, "lm_head.weight": (31, 16)})
    assert accepted("frequencies", {**shapes, "model.layers.0.self_attn.rotary_emb.inv_freq": (4,)})
    assert not accepted("more", {**shapes, "model.layers.2.input_layernorm.weight": (16,)})
    missing = "model.layers.1.self_attn.o_proj.weight"
    assert not accepted("missing", {name: shape for name, shape in shapes.items() if name != missing})
    assert not accepted("turned", {**shapes, "model.layers.1.mlp.down_proj.weight": (24, 16)})


def test_truncated_file_is_not_accepted(tmp_path: Path) -> None:
    config = config_of("qwen3")
    write(tmp_path, config, expected_shapes(config, CONTEXT) or {})
    assert is_accepted(tmp_path)
    file = tmp_path / "part-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert not is_accepted(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        HFModel(tmp_path, World(), max_context=CONTEXT)
