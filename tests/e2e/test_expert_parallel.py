"""Ranks that divide the experts of each layer make the steps that one rank makes, on gloo."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.sharded_steps import three_steps
from e2e.tiny_policy import make_tiny_moe
from e2e.warm import run_world
from models.families import make_family
from safetensors.torch import load_file

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 2": {"data_parallel": 2, "expert_parallel": 2},
    "EP 2, checkpointed, with a reference on the host": {
        "data_parallel": 2,
        "expert_parallel": 2,
        "activation_checkpointing": "full",
        "offload": ("activations", "reference"),
    },
    "EP 2 x CP 2": {"context_parallel": 2, "expert_parallel": 2},
    "FSDP 2 x EP 2": {"data_parallel": 4, "expert_parallel": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"torchtitan's qwen3_moe": make_tiny_moe(tmp_path_factory.mktemp("model"))}
    for name in ("qwen2_moe", "mixtral"):
        made[name] = make_family(name, tmp_path_factory.mktemp("model") / name)
    return made


@pytest.mark.parametrize("name", ["torchtitan's qwen3_moe", "qwen2_moe", "mixtral"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_and_one_from_a_checkpoint_of_one_rank(
    folders: dict[str, Path], name: str, layout: str, tmp_path: Path
) -> None:
    folder, settings = folders[name], LAYOUTS[layout]
    three_steps(folder, tmp_path / "one")
    alone = three_steps(folder, tmp_path / "one", resume=tmp_path / "one" / "checkpoint")
    num_ranks = settings.get("data_parallel", 1) * settings.get("context_parallel", 1)
    resume = tmp_path / "one" / "checkpoint"
    for metrics in run_world(three_steps, num_ranks, folder=folder, out=tmp_path / "two", resume=resume, **settings):
        for found, expected in zip(metrics, alone, strict=True):
            assert found.keys() == expected.keys()
            for key in found.keys() - {"padding_fraction"}:
                assert math.isclose(found[key], expected[key], rel_tol=2e-4, abs_tol=2e-6), key
    expected = load_file(tmp_path / "one" / "export" / "model.safetensors")
    exported = load_file(tmp_path / "two" / "export" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for key, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=5e-6)
    (*_, resumed) = three_steps(folder, tmp_path / "again", resume=tmp_path / "two" / "checkpoint")
    assert math.isclose(resumed["loss"], alone[-1]["loss"], rel_tol=2e-4, abs_tol=2e-6)
