"""Share of a GPU's memory that an engine takes."""

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


def test_two_engines_fit_on_one_gpu() -> None:
    share = gpu_share_of(80 * GB, weight_bytes=16 * GB, kv_bytes=20 * GB)
    assert share * 80 * GB == pytest.approx(36 * GB + WORK_BYTES)
    assert 2 * share < 1


def test_oversized_kv_cache_error_names_a_size_that_fits() -> None:
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
def test_default_kv_cache_fills_the_engine_share_of_the_gpu(
    free: int, share: float | None, neighbours: int, part: int
) -> None:
    kv_bytes = kv_bytes_of(80 * GB, free * GB, weight_bytes=16 * GB, share=share, neighbours=neighbours)
    assert kv_bytes == part * GB - 16 * GB - WORK_BYTES
    fills = gpu_share_of(80 * GB, weight_bytes=16 * GB, kv_bytes=kv_bytes)
    assert fills * 80 * GB == pytest.approx(part * GB)


def test_error_without_room_for_a_kv_cache_names_the_fix() -> None:
    with pytest.raises(ModelError, match=r"14\.9 GiB .* of the 16\.8 GiB .*\b4 engines on a GPU.*\.num_generators"):
        kv_bytes_of(80 * GB, 80 * GB, weight_bytes=16 * GB, share=None, neighbours=3)


def test_planned_kv_cache_size_has_a_default_only_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: False)
    assert (planned_kv_gib(None), planned_kv_gib(3.0)) == (CPU_KV_GIB, 3.0)
    monkeypatch.setattr("titan_rl.generation.gpu_share.has_gpu_driver", lambda: True)
    assert (planned_kv_gib(None), planned_kv_gib(3.0)) == (None, 3.0)


def test_weight_bytes_use_the_serving_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 3), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(5)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert weight_bytes(tmp_path, "bfloat16") == 2 * 42
    assert weight_bytes(tmp_path, "float32") == 4 * 42


def test_adapter_bytes_count_only_the_target_matrices(tmp_path: Path) -> None:
    shapes = {"q_proj.weight": (4, 6), "q_proj.bias": (4,), "o_proj.weight": (6, 4), "experts.0.q_proj.weight": (4, 6)}
    save_file(
        {f"model.layers.0.{name}": torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "m.safetensors"
    )
    assert adapter_bytes(tmp_path, "bfloat16", ["q_proj"], rank=8) == 2 * 8 * (4 + 6)
    assert adapter_bytes(tmp_path, "float32", ["q_proj", "o_proj"], rank=8) == 4 * 8 * (4 + 6 + 6 + 4)
