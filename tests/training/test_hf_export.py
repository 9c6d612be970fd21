"""Contents of an exported model folder."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from titan_rl.core.errors import CheckpointError
from titan_rl.training.export import export_hf
from titan_rl.training.settings import MADE_BY_SFT


def test_export_copies_the_tokenizer_but_not_the_sft_marker(tmp_path: Path) -> None:
    source, out = tmp_path / "base", tmp_path / "out"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", MADE_BY_SFT, "model.safetensors"):
        (source / name).write_text("of the base")
    (source / "config.json").write_text('{"dtype": "bfloat16", "hidden_size": 1}')
    tensors = {"weight": torch.ones(1)}
    export_hf(out, tensors, tensors.items(), source=source, dtype="float32")
    assert {file.name for file in out.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert '"dtype": "float32"' in (out / "config.json").read_text()
    assert (out / "model.safetensors").read_bytes() != b"of the base"


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    names, expected = [f"layer.{index}" for index in range(4)], torch.ones(300, 2).bfloat16()
    alive: list[weakref.ref[torch.Tensor]] = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for index, name in enumerate(names):
            assert sum(each() is not None for each in alive) <= 1, "tensors already written must be freed"
            tensor = expected * index
            alive.append(weakref.ref(tensor))
            yield name, tensor

    (tmp_path / "config.json").write_text("{}")
    layout = {name: torch.empty(300, 2, dtype=torch.bfloat16, device="meta") for name in names}
    export_hf(tmp_path / "out", layout, gathered(), source=tmp_path, dtype="bfloat16")
    found = load_file(tmp_path / "out/model.safetensors")
    assert list(found) == names
    assert all(torch.equal(found[name], expected * index) for index, name in enumerate(names))


def test_rejects_tensors_that_do_not_match_the_layout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    layout = {"weight": torch.empty(3)}
    for wrong in ({"weight": torch.ones(4)}, {"bias": torch.ones(3)}, {"weight": torch.ones(3).double()}, {}):
        with pytest.raises(CheckpointError, match=r"in place of weight|longer"):
            export_hf(tmp_path / "out", layout, wrong.items(), source=tmp_path, dtype="float32")
    assert not (tmp_path / "out").exists()
