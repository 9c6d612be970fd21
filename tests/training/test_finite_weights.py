"""Weights with NaN or infinite values: the trainer names the file and the tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from titan_rl.core.errors import ModelError
from titan_rl.training.models import finite_weights
from titan_rl.training.models.finite_weights import check_finite_folder, require_finite
from titan_rl.training.models.hf_model import HFModel
from titan_rl.training.parallel import World
from titan_rl.training.tiny_model import make_tiny_model


@pytest.mark.parametrize("implementation", ["torchtitan", "transformers"])
def test_trainer_names_the_tensor_that_is_not_finite(tmp_path: Path, implementation: str) -> None:
    folder = tmp_path / "policy"
    make_tiny_model(folder, texts=["one two three"] * 9, parameters=100_000)
    model = HFModel(folder, World(), max_context=64, implementation=implementation)  # pyright: ignore[reportArgumentType]
    model.load(torch.device("cpu"))

    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name][0, 0] = math.nan
    save_file(tensors, file, {"format": "pt"})

    model = HFModel(folder, World(), max_context=64, implementation=implementation)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match=f"{file} has NaN or infinite values in '{name}'; fetch the file again"):
        model.load(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int8])
def test_every_dtype_is_checked(dtype: torch.dtype) -> None:
    require_finite(torch.ones(3, 5).to(dtype), "w", Path("f"))
    require_finite(torch.ones(0, 5).to(dtype), "w", Path("f"))
    if dtype.is_floating_point:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ModelError, match="f has NaN or infinite values in 'w'"):
                require_finite(torch.tensor([1.0, value, 2.0]).to(dtype), "w", Path("f"))


def test_check_of_a_folder_reads_a_limited_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "1.safetensors")
    save_file({"b": torch.full((4,), math.nan)}, tmp_path / "2.safetensors")
    with pytest.raises(ModelError, match=r"2.safetensors has NaN or infinite values in 'b'"):
        check_finite_folder(tmp_path)
    monkeypatch.setattr(finite_weights, "MOST_BYTES", 16)
    check_finite_folder(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_value_of_a_long_tensor_is_found_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    largest = torch.full((3, 1 << 21), torch.finfo(dtype).max, dtype=dtype)
    save_file({"a": torch.ones(3, dtype=torch.int8), "w": largest}, tmp_path / "1.safetensors")
    check_finite_folder(tmp_path)
    largest[2, -1] = -math.inf
    save_file({"a": torch.ones(3, dtype=torch.int8), "w": largest}, tmp_path / "1.safetensors")
    with pytest.raises(ModelError, match="in 'w'"):
        check_finite_folder(tmp_path)
