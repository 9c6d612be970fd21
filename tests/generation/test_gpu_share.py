"""What an engine takes of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from titan_rl.core.errors import ModelError
from titan_rl.generation.gpu_share import (
    CPU_KV_GIB,
    WORK_BYTES,
    adapter_bytes,
    gpu_share_of,
    kv_bytes_of,
    planned_kv_gib,
    weight_bytes,
)

GB = 10**9


def test_engines_that_share_a_gpu_fit_beside_each_other() -> None:
    share = gpu_share_of(80 * GB, weight_bytes=16 * GB, kv_bytes=20 * GB)
    assert share * 80 * GB == pytest.approx(36 * GB + WORK_BYTES)
    assert 2 * share < 1


def test_what_does_not_fit_is_said_with_what_would() -> None:
    with pytest.raises(
        ModelError, match=r"14\.9 GiB, a KV cache of 10\.0 GiB .*kv_cache_gib to at most 4\.5"
    ) as raised:
        gpu_share_of(24 * GB, weight_bytes=16 * GB, kv_bytes=10 * 2**30)
    fits = float(str(raised.value).split("at most ")[1].split(",")[0])
    assert gpu_share_of(24 * GB, weight_bytes=16 * GB, kv_bytes=int((fits - 0.1) * 2**30)) <= 1


@pytest.mark.parametrize(
    ("free", "share", "neighbours", "part"),
    [
        (80, None, 0, 72),  # 0.9 of it
        (50, None, 0, 49),  # another program has the rest
        (10, None, 1, 36),  # the neighbour may have started already
        (80, 0.5, 1, 40),
    ],
)
def test_by_default_the_kv_cache_fills_an_engines_part_of_its_gpu(
    free: int, share: float | None, neighbours: int, part: int
) -> None:
    kv_bytes = kv_bytes_of(80 * GB, free * GB, weight_bytes=16 * GB, share=share, neighbours=neighbours)
    assert kv_bytes == part * GB - 16 * GB - WORK_BYTES
    fills = gpu_share_of(80 * GB, weight_bytes=16 * GB, kv_bytes=kv_bytes)
    assert fills * 80 * GB == pytest.approx(part * GB)


def test_weights_that_leave_no_kv_cache_are_refused_with_what_would_help() -> None:
    with pytest.raises(ModelError, match=r"14\.9 GiB .* of the 16\.8 GiB .* 4 engines on a GPU.*\.num_generators"):
        kv_bytes_of(80 * GB, 80 * GB, weight_bytes=16 * GB, share=None, neighbours=3)


def test_what_an_engine_takes_is_planned_for_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: False)
    assert (planned_kv_gib(None), planned_kv_gib(3.0)) == (CPU_KV_GIB, 3.0)
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: True)
    assert (planned_kv_gib(None), planned_kv_gib(3.0)) == (None, 3.0)


def test_weights_are_counted_in_the_dtype_they_are_served_in(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 3), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(5)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert weight_bytes(tmp_path, "bfloat16") == 2 * 42
    assert weight_bytes(tmp_path, "float32") == 4 * 42


def test_a_slot_for_an_adapter_is_counted_by_the_matrices_it_changes(tmp_path: Path) -> None:
    shapes = {"q_proj.weight": (4, 6), "q_proj.bias": (4,), "o_proj.weight": (6, 4), "experts.0.q_proj.weight": (4, 6)}
    save_file(
        {f"model.layers.0.{name}": torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "m.safetensors"
    )
    assert adapter_bytes(tmp_path, "bfloat16", ["q_proj"], rank=8) == 2 * 8 * (4 + 6)
    assert adapter_bytes(tmp_path, "float32", ["q_proj", "o_proj"], rank=8) == 4 * 8 * (4 + 6 + 6 + 4)
