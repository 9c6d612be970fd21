"""What an engine takes of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from titan_rl.errors import ModelError
from titan_rl.generation.gpu_share import WORK_BYTES, gpu_share_of, weight_bytes

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


def test_weights_are_counted_in_the_dtype_they_are_served_in(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10, 3), "b": torch.zeros(7)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(5)}, tmp_path / "model-2.safetensors", metadata={"format": "pt"})
    assert weight_bytes(tmp_path, "bfloat16") == 2 * 42
    assert weight_bytes(tmp_path, "float32") == 4 * 42
