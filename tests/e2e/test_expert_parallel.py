"""Expert-parallel ranks train, publish and resume like one rank, on gloo."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.sharded_publish import publish_models
from e2e.sharded_steps import (
    gradients_of_given_experts,
    step_without_one_rank,
    steps_and_resumed_steps,
    three_steps,
)
from e2e.tiny_policy import make_tiny_moe
from e2e.warm import run_world
from models.families import make_family
from safetensors.torch import load_file

TORCHTITAN = "qwen3_moe"  # six experts, in torchtitan's implementation
TWO = {"data_parallel": 2, "expert_parallel": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 2": TWO,
    "EP 2 x CP 2": {"context_parallel": 2, "expert_parallel": 2},
    "FSDP 2 x EP 2": {"data_parallel": 4, "expert_parallel": 2},
    "FSDP 2 x EP 2, offloaded": {
        "data_parallel": 4,
        "expert_parallel": 2,
        "activation_checkpointing": "full",
        "offload": ("activations", "parameters", "reference"),
    },
}
RUN_ALWAYS = (TORCHTITAN, "EP 2 x CP 2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {TORCHTITAN: make_tiny_moe(tmp_path_factory.mktemp("model"))}
    for name in ("qwen2_moe", "mixtral"):
        made[name] = make_family(name, tmp_path_factory.mktemp("model") / name)
    return made


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) == RUN_ALWAYS else in_depth)
        for name in (TORCHTITAN, "qwen2_moe", "mixtral")
        for layout in LAYOUTS
    ],
)
def test_expert_parallel_steps_and_resume_match_one_rank(
    folders: dict[str, Path], name: str, layout: str, tmp_path: Path
) -> None:
    folder, settings = folders[name], LAYOUTS[layout]
    three_steps(folder, tmp_path / "one")
    resume = tmp_path / "one" / "checkpoint"
    alone = three_steps(folder, tmp_path / "one", resume=resume)
    num_ranks = settings.get("data_parallel", 1) * settings.get("context_parallel", 1)
    for metrics in run_world(three_steps, num_ranks, folder=folder, out=tmp_path / "all", resume=resume, **settings):
        assert len(metrics) == len(alone) == 4
        for found, expected in zip(metrics, alone, strict=True):
            assert found.keys() == expected.keys()
            for key in found.keys() - {"padding_fraction"}:
                assert math.isclose(found[key], expected[key], rel_tol=2e-4, abs_tol=2e-6), key
    expected = load_file(tmp_path / "one" / "export" / "model.safetensors")
    exported = load_file(tmp_path / "all" / "export" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for key, tensor in exported.items():
        # AdamW normalizes gradients and amplifies their rounding; a wrong one moves a weight by `lr`, 1e-4, per step.
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=2e-5)
    (*_, resumed) = three_steps(folder, tmp_path / "again", resume=tmp_path / "all" / "checkpoint")
    assert math.isclose(resumed["loss"], alone[-1]["loss"], rel_tol=2e-4, abs_tol=2e-6)


@pytest.mark.parametrize(
    ("name", "data_parallel"),
    [
        ("mixtral", 4),
        pytest.param("mixtral", 2, marks=in_depth),
        pytest.param(TORCHTITAN, 2, marks=in_depth),
        pytest.param(TORCHTITAN, 4, marks=in_depth),
    ],
)
def test_gradients_match_one_rank_when_a_rank_gets_no_tokens(
    folders: dict[str, Path], name: str, data_parallel: int
) -> None:
    alone, expected = gradients_of_given_experts(folders[name])
    for logprobs, gradients in run_world(
        gradients_of_given_experts, data_parallel, folder=folders[name], data_parallel=data_parallel, expert_parallel=2
    ):
        assert logprobs == pytest.approx(alone, abs=1e-5)
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            assert abs(gradient - expected[key]).max() <= 1e-4 * abs(expected[key]).max() + 1e-7, key
    experts = next(each for key, each in expected.items() if "experts" in key)
    assert experts[0].any()
    assert not experts[len(experts) // 2 :].any()


@pytest.mark.parametrize("name", ["mixtral", pytest.param(TORCHTITAN, marks=in_depth)])
def test_resumed_steps_are_bitwise_identical(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    for losses, resumed in run_world(steps_and_resumed_steps, 2, folder=folders[name], out=tmp_path, **TWO):
        assert losses[2:] == resumed


@pytest.mark.parametrize("name", ["mixtral", pytest.param(TORCHTITAN, marks=in_depth)])
def test_each_rank_publishes_its_own_experts(folders: dict[str, Path], name: str) -> None:
    for by_model in run_world(publish_models, 2, models=[(str(folders[name]), "float32")], **TWO):
        for found in by_model:
            assert found["num_gathered"] == 0
            for compared in found["compared"]:
                assert compared["wrong"] == []
                assert max(compared["part_bytes"]) < 0.7 * compared["whole_bytes"]


@in_depth
def test_ranks_fail_if_a_peer_is_gone(folders: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match=r"rank 0:[\s\S]*dispatch[\s\S]*(Connection|peer)"):
        run_world(step_without_one_rank, 2, folder=folders[TORCHTITAN], row_tokens=64, rows_per_micro_batch=2, **TWO)
