"""What an exported folder takes over from the one that the model came from."""

from __future__ import annotations

from pathlib import Path

import torch

from titan_rl.training.settings import MADE_BY_SFT
from titan_rl.training.state.hf_export import export_hf


def test_an_export_has_the_tokenizer_and_not_the_note_by_which_a_folder_may_be_replaced(tmp_path: Path) -> None:
    source, out = tmp_path / "base", tmp_path / "out"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", MADE_BY_SFT, "model.safetensors"):
        (source / name).write_text("of the base")
    (source / "config.json").write_text('{"dtype": "bfloat16", "hidden_size": 1}')
    export_hf(out, [("weight", torch.ones(1))], source=source, dtype="float32")
    assert {file.name for file in out.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert '"dtype": "float32"' in (out / "config.json").read_text()
    assert (out / "model.safetensors").read_bytes() != b"of the base"
