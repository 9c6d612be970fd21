"""Checkpoints of another model, optimizer or format version are rejected with advice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
from torch import nn

from titan_rl.core.errors import CheckpointError
from titan_rl.training.parallel import World
from titan_rl.training.state.checkpoint import read_checksums, write_checksums, write_summed
from titan_rl.training.state.train_state import STATE, TrainState, TrainStateWriter, load_train_state

OTHER = "belongs to another model or optimizer; set model.path to the model of its run, or start a new run"


def trained(model: nn.Module) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return TrainState((model, [optimizer]))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    writer = TrainStateWriter(World())
    writer.begin(tmp_path / "step-000003", trained(nn.Linear(4, 2)), 3, {})
    writer.finish()
    return tmp_path / "step-000003"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 3), r"has shape \(2, 4\); this trainer's has \(3, 4\)"),
        (nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)), "it lacks model"),
        (nn.Linear(4, 2, bias=False), "which this trainer does not have"),
    ],
)
def test_rejects_checkpoint_of_another_model(checkpoint: Path, model: nn.Module, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"step-000003 could not be read: .*{message}.*: it {OTHER}"):
        load_train_state(checkpoint, trained(model), World())


def test_rejects_checkpoint_of_another_format_version(checkpoint: Path) -> None:
    stored = json.loads((checkpoint / STATE).read_text()) | {"format": 999}
    checksums = {**read_checksums(checkpoint), STATE: write_summed(checkpoint / STATE, json.dumps(stored))}
    write_checksums(checkpoint, checksums)
    with pytest.raises(CheckpointError, match=r"it has format 999, and .*; continue with the version that wrote it"):
        load_train_state(checkpoint, trained(nn.Linear(4, 2)), World())
