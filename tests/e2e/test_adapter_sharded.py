"""Adapter training with FSDP, context and tensor parallelism matches one rank, on gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from depth import in_depth
from e2e.sharded_steps import three_steps
from e2e.tiny_policy import make_tiny_llama3, make_tiny_qwen3
from e2e.warm import run_world
from models.families import make_family
from safetensors.torch import load_file

from titan_rl.training.export import export_checkpoint

LAYOUTS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "FSDP 2": (make_tiny_llama3, {"data_parallel": 2, "activation_checkpointing": "full"}),
    "TP 2": (make_tiny_qwen3, {"tensor_parallel": 2}),
    "CP 2": (make_tiny_qwen3, {"context_parallel": 2}),
    "FSDP 2 of transformers": (
        partial(make_family, "qwen2"),
        {"data_parallel": 2, "activation_checkpointing": "full"},
    ),
    "FSDP 2 x TP 2": (make_tiny_qwen3, {"data_parallel": 2, "tensor_parallel": 2}),
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name in ("FSDP 2 of transformers", "TP 2") else in_depth) for name in LAYOUTS],
)
def test_sharded_adapter_steps_and_resume_match_one_rank(layout: str, tmp_path: Path) -> None:
    make, settings = LAYOUTS[layout]
    folder = make(tmp_path / "model")
    training: dict[str, Any] = {"adapter": {"rank": 4}, "lr": 1e-3}
    three_steps(folder, tmp_path / "first", **training)
    start = tmp_path / "start"
    export_checkpoint(folder, tmp_path / "first" / "checkpoint", start, renderer="chat_template", as_adapter=True)
    training["adapter"]["start"] = str(start)
    alone = three_steps(folder, tmp_path / "one", resume=tmp_path / "first" / "checkpoint", **training)
    ranks = run_world(
        three_steps,
        math.prod(value for name, value in settings.items() if name.endswith("_parallel")),
        folder=folder,
        out=tmp_path / "several",
        resume=tmp_path / "first" / "checkpoint",
        **training,
        **settings,
    )
    assert alone[0]["reference_kl"] == pytest.approx(0, abs=1e-9)
    assert alone[1]["reference_kl"] > 1e-6
    for metrics in ranks:
        for found, expected in zip(metrics, alone, strict=True):
            for name in found.keys() - {"padding_fraction"}:
                assert math.isclose(found[name], expected[name], rel_tol=2e-4, abs_tol=2e-6), name
    expected = load_file(tmp_path / "one" / "export" / "model.safetensors")
    exported = load_file(tmp_path / "several" / "export" / "model.safetensors")
    base = load_file(folder / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5)
    changed = {name.split(".")[-2] for name, tensor in exported.items() if not torch.equal(tensor, base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
