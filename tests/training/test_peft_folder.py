"""Adapter folders written in PEFT's format."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch

from titan_rl.training.models.lora import read_peft, write_peft
from titan_rl.training.settings import AdapterConfig

LAYER = "model.layers.0.self_attn.q_proj"


def test_peft_folder_respects_umask_and_round_trips_bitwise(tmp_path: Path) -> None:
    settings = AdapterConfig(rank=2, alpha=8.0)
    tensors = {f"{LAYER}.lora_A.weight": torch.randn(2, 6), f"{LAYER}.lora_B.weight": torch.randn(2, 4).t()}
    before = os.umask(0o022)
    try:
        write_peft(tmp_path / "adapter", tensors, settings, base="base", targets=["q_proj"])
    finally:
        os.umask(before)
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "adapter").iterdir()}
    assert modes == {"adapter_config.json": "0o644", "adapter_model.safetensors": "0o644"}
    read = read_peft(tmp_path / "adapter", settings, {name: tuple(each.shape) for name, each in tensors.items()})
    assert all(torch.equal(read[name], each) for name, each in tensors.items())
