"""Tensor slices on disk: any slice can be read, regardless of the slices written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the cpu or gpu extra")

import itertools

import torch
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from titan_rl.core.errors import DamagedCheckpointError
from titan_rl.training.state.train_state import TensorFiles, write_slices
from titan_rl.weights.types import SlicePosition, TensorSlice

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


def cut(tensor: torch.Tensor, start: tuple[int, ...], end: tuple[int, ...]) -> TensorSlice:
    box = tensor[tuple(slice(a, b) for a, b in zip(start, end, strict=True))]
    return TensorSlice(box, SlicePosition(start, tuple(tensor.shape)))


def whole(tensor: torch.Tensor) -> TensorSlice:
    return cut(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_any_slice_can_be_read_from_any_written_slices(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("slices")
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    dtype = data.draw(st.sampled_from(DTYPES))
    matrix = torch.arange(1, rows * columns + 1).reshape(rows, columns).to(dtype)
    row_cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=3))})
    column_cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=2))})
    boxes = [
        cut(matrix, (top, left), (bottom, right))
        for top, bottom in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]
    for rank, box in enumerate(boxes):
        write_slices(
            folder / f"{rank}.safetensors",
            {"layers.0.weight": box} | ({"step": whole(matrix[0, 0])} if rank == 0 else {}),
        )
    files = TensorFiles([folder / f"{rank}.safetensors" for rank in range(len(boxes))])
    assert files.names == {"layers.0.weight", "step"}
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    bottom, right = data.draw(st.integers(top, rows)), data.draw(st.integers(left, columns))
    expected, target = (
        cut(matrix, (top, left), (bottom, right)),
        cut(torch.zeros_like(matrix), (top, left), (bottom, right)),
    )
    step = torch.zeros((), dtype=dtype)
    files.read({"layers.0.weight": target, "step": whole(step)})
    assert torch.equal(target.tensor, expected.tensor)
    assert torch.equal(step, matrix[0, 0])


def test_written_file_is_readable_by_safetensors(tmp_path: Path):
    written = {"a": torch.randn(3, 5).T, "empty": torch.zeros(0, 4), "b": torch.randn(4).bfloat16()}
    write_slices(tmp_path / "rank-0.safetensors", {name: whole(tensor) for name, tensor in written.items()})
    read = load_file(tmp_path / "rank-0.safetensors")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (torch.zeros(4, 3), "w is incomplete: 10 of 12 elements were found"),
        (torch.zeros(4, 4), r"w has shape \(4, 3\); this trainer's has \(4, 4\)"),
    ],
)
def test_missing_elements_and_wrong_shapes_are_named(tmp_path: Path, wanted: torch.Tensor, message: str):
    matrix = torch.randn(4, 3)
    files = []
    for rank, (start, end) in enumerate([((0, 0), (2, 3)), ((2, 0), (4, 2))]):
        files.append(tmp_path / f"rank-{rank}.safetensors")
        write_slices(files[-1], {"w": cut(matrix, start, end)})
    with pytest.raises(ValueError, match=message):
        TensorFiles(files).read({"w": whole(wanted)})


def test_rejects_wrong_dtypes_and_invalid_files(tmp_path: Path):
    path = tmp_path / "rank-0.safetensors"
    write_slices(path, {"w": whole(torch.zeros(2))})
    with pytest.raises(ValueError, match=r"w is torch\.float32; this trainer's is torch\.bfloat16"):
        TensorFiles([path]).read({"w": whole(torch.zeros(2, dtype=torch.bfloat16))})
    path.write_bytes(b"no such thing")
    with pytest.raises(DamagedCheckpointError, match="rank-0"):
        TensorFiles([path])
    with pytest.raises(TypeError, match=r"w is torch\.complex64"):
        write_slices(path, {"w": whole(torch.zeros(2, dtype=torch.complex64))})
