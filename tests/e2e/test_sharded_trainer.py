"""FSDP, context and tensor parallelism, alone and combined, match one rank, on gloo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.sharded_steps import drawn, logprobs_and_kept_weights, step_skipped_and_step_made, three_steps
from e2e.tiny_policy import make_tiny_qwen3
from e2e.warm import run_world
from safetensors.torch import load_file

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP 2": {"data_parallel": 2, "activation_checkpointing": "full"},
    "TP 2": {"tensor_parallel": 2},
    "CP 2": {"context_parallel": 2},
    "FSDP 2 x CP 2": {
        "data_parallel": 2,
        "context_parallel": 2,
        "activation_checkpointing": "full",
        "offload": ("activations", "reference"),
    },
    "FSDP 2 x TP 2, tied": {"data_parallel": 2, "tensor_parallel": 2},
}
ODD = 129  # vocabulary size that ranks share unevenly
EXACT = ["num_tokens", "num_samples", "num_dropped_samples", "num_nonfinite_tokens", "staleness_max", "lr"]


@dataclass
class OneRank:
    folder: Path
    out: Path
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, OneRank]:
    """Results of one rank, by whether embeddings are tied."""
    found: dict[bool, OneRank] = {}
    for tied in (False, True):
        folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"), tied=tied, vocab_size=ODD)
        out = tmp_path_factory.mktemp("one")
        three_steps(folder, out)
        found[tied] = OneRank(folder, out, three_steps(folder, out, resume=out / "checkpoint"))
    return found


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if " x " in name else in_depth) for name in LAYOUTS])
def test_sharded_steps_and_resume_match_one_rank(one_rank: dict[bool, OneRank], layout: str, tmp_path: Path) -> None:
    settings = LAYOUTS[layout]
    alone = one_rank["tied" in layout]
    ranks = run_world(
        three_steps,
        math.prod(value for name, value in settings.items() if name.endswith("_parallel")),
        folder=alone.folder,
        out=tmp_path,
        resume=alone.out / "checkpoint",
        **settings,
    )
    for metrics in ranks:
        assert len(metrics) == len(alone.metrics) == 4
        for found, expected in zip(metrics, alone.metrics, strict=True):
            assert found.keys() == expected.keys()
            assert [found[name] for name in EXACT] == [expected[name] for name in EXACT]
            for name in found.keys() - {"padding_fraction", *EXACT}:
                assert math.isclose(found[name], expected[name], rel_tol=2e-4, abs_tol=2e-6), name
    expected = load_file(alone.out / "export" / "model.safetensors")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        # AdamW normalizes gradients and amplifies their rounding; a wrong one moves a weight by `lr`, 1e-4, per step.
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=5e-6)

    # One rank resumes from the checkpoint of several.
    (*_, resumed) = three_steps(alone.folder, tmp_path / "again", resume=tmp_path / "checkpoint")
    assert math.isclose(resumed["loss"], alone.metrics[-1]["loss"], rel_tol=2e-4, abs_tol=2e-6)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=in_depth), "muon"])
def test_other_optimizers_and_reference_updates_match_one_rank(
    one_rank: dict[bool, OneRank], optimizer: str, tmp_path: Path
):
    folder, settings = one_rank[False].folder, {"optimizer": optimizer, "lr": 1e-3, "reference_interval": 2}
    three_steps(folder, tmp_path / "one", **settings)
    alone = three_steps(folder, tmp_path / "one", resume=tmp_path / "one" / "checkpoint", **settings)
    for metrics in run_world(
        three_steps,
        2,
        folder=folder,
        out=tmp_path / "two",
        data_parallel=2,
        resume=tmp_path / "one" / "checkpoint",
        **settings,
    ):
        for found, expected in zip(metrics, alone, strict=True):
            assert math.isclose(found["loss"], expected["loss"], rel_tol=1e-3)
        first, before, after, resumed = (each["reference_kl"] for each in metrics)
        assert max(first, after) < 1e-6 < min(before, resumed)
    initial = load_file(folder / "model.safetensors")
    expected = load_file(tmp_path / "one" / "export" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "two" / "export" / "model.safetensors").items():
        # Muon orthogonalizes in bfloat16. A wrong update would differ in every element.
        moved = (expected[name] - initial[name]).norm()
        assert (tensor - expected[name]).norm() < 0.02 * moved, name
    (*_, resumed) = three_steps(folder, tmp_path / "again", resume=tmp_path / "two" / "checkpoint", **settings)
    assert math.isclose(resumed["loss"], alone[-1]["loss"], rel_tol=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        "data_parallel",
        pytest.param("context_parallel", marks=in_depth),
        pytest.param("tensor_parallel", marks=in_depth),
    ],
)
def test_all_ranks_skip_a_step_untrainable_on_one_rank(one_rank: dict[bool, OneRank], layout: str) -> None:
    for results, equal in run_world(step_skipped_and_step_made, 2, folder=one_rank[False].folder, **{layout: 2}):
        assert [result.version for result in results] == [1, 2]
        (part,) = results[0].skipped
        assert part.at_fault == ("g/0",)
        assert sorted(part.rollout_ids) == [f"g/{number}" for number in range(7)]
        assert not results[1].skipped
        assert all(equal)


def test_bfloat16_ranks_save_no_gathered_weights_for_backward(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "model", vocab_size=144)
    alone, _ = logprobs_and_kept_weights(folder, data_parallel=1)
    for logprobs, kept in run_world(logprobs_and_kept_weights, 2, folder=folder, data_parallel=2):
        assert kept == 0
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(alone), rtol=0, atol=0.05)


def test_ranks_with_uneven_vocabulary_shards_draw_the_same_sequences(one_rank: dict[bool, OneRank]) -> None:
    folder = one_rank[False].folder
    alone = drawn(folder)
    assert run_world(drawn, 2, folder=folder, tensor_parallel=2) == [alone, alone]
