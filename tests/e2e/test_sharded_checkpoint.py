"""Sharded checkpoints: a full disk or a damaged file on one rank fails all ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

import torch
import torch.distributed as dist
from e2e.warm import run_world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_rl.core.errors import CheckpointError
from titan_rl.training.parallel import World
from titan_rl.training.state import train_state
from titan_rl.training.state.train_state import TrainState, TrainStateWriter, load_train_state


def make_model(mesh: Any, seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A matrix sharded unevenly over two ranks, a replicated vector, and the moments of AdamW."""
    torch.manual_seed(seed)
    model = nn.Linear(6, 5)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Shard(0)]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.data, mesh, [Replicate()]))
    for parameter in model.parameters():
        parameter.grad = distribute_tensor(torch.randn(parameter.shape), mesh, parameter.placements)  # pyright: ignore
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    optimizer.step()
    return model, [optimizer]


def error_of(call: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def save_and_load(root: Path) -> dict[str, Any]:
    """Save and load on one of two ranks, with a full disk and with a damaged file."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    world = World(data_parallel=2, rank=dist.get_rank())
    model, optimizers = make_model(mesh, seed=0)
    writer = TrainStateWriter(world)
    whole = root / "step-000003"
    writer.begin(whole, TrainState((model, optimizers)), 3, {"note.json": "{}"})
    writer.finish()
    other, its_optimizers = make_model(mesh, seed=1)
    version = load_train_state(whole, TrainState((other, its_optimizers)), world)
    equal = all(map(torch.equal, map(full, model.parameters()), map(full, other.parameters())))

    no_room = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(
        train_state, "write_slices", side_effect=no_room if world.rank == 1 else train_state.write_slices
    ):
        writer.begin(root / "step-000004", TrainState((model, optimizers)), 4, {})
        full_disk = error_of(writer.finish)
    dist.barrier()
    if world.is_first:
        damaged = bytearray((whole / "rank-1.safetensors").read_bytes())
        damaged[-9] ^= 1
        (whole / "rank-1.safetensors").write_bytes(damaged)
    dist.barrier()
    return {
        "version": version,
        "equal": equal,
        "full_disk": full_disk,
        "damage": error_of(lambda: load_train_state(whole, TrainState((other, its_optimizers)), world)),
    }


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor()


def test_ranks_save_their_shards_and_fail_together(tmp_path: Path):
    first, second = run_world(save_and_load, 2, root=tmp_path)
    assert first == second
    assert (first["version"], first["equal"]) == (3, True)
    assert first["full_disk"] == f"NoSpaceError: no space left in {tmp_path}, where step-000004 was being written"
    assert f"DamagedCheckpointError: {tmp_path}/step-000003/rank-1.safetensors is damaged" in first["damage"]
    assert sorted(os.listdir(tmp_path)) == ["step-000003"]
    assert sorted(os.listdir(tmp_path / "step-000003")) == [
        "checksums.json",
        "note.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
        "state.json",
    ]
