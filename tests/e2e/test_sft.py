"""`titan-rl sft` with a trainer of two ranks, stopped and resumed to the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from e2e.runs import run_training
from transformers import Qwen3ForCausalLM

from titan_rl.config.load import load_config
from titan_rl.viewer.trace import Traces


def test_sft_trains_and_saves_a_tiny_model_across_a_resume(tmp_path: Path) -> None:
    base = tmp_path / "base"
    settings = {"demonstrations": 200, "batch_size": 10, "held_out": 20, "interval": 0, "out": base}
    with run_training(
        tmp_path,
        command="sft",
        training__data_parallel=2,
        sft__tiny_model__parameters=60_000,
        **{f"sft__{name}": value for name, value in settings.items()},
    ) as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.output
        assert "to continue: titan-rl sft --resume" in run.output
        assert not base.exists()
        run.resume("--training.data_parallel", "1")
        assert run.wait() == 0, run.output
        steps = [record for record in run.metrics() if "train/loss" in record]
        assert [record["step"] for record in steps] == list(range(1, 19))
        (before, after) = (record["validation/loss"] for record in run.metrics() if "validation/loss" in record)
        assert after < 0.8 * before
        traces = Traces(run.folder / "trace")
        lanes = {process: trace.lanes for process, trace in traces.read().items()}
        (done,) = (trace["steps"] for process, trace in lanes.items() if process == "controller")
        assert {one.args["step"] for one in done if one.name == "train step"} == set(range(1, 19))
        assert any(process.startswith("trainer") and "train" in found for process, found in lanes.items()), lanes.keys()
        # The tokenizer's library creates an empty cache on first import, before the run sets its own TMPDIR.
        assert [left for left in run.leftovers() if not left.endswith("tiktoken-rs-cache")] == []
    note = json.loads((base / "sft.json").read_text())
    assert note["held_out_loss"] == {"before": before, "after": after}
    model, about = Qwen3ForCausalLM.from_pretrained(base, output_loading_info=True)
    assert not any(about.values())
    assert not model.config.tie_word_embeddings
    load_config("examples/alphabet_sort/cpu.toml", [("model.path", str(base))])  # validates the folder
