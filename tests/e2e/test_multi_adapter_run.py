"""A run with two adapters on the full stack: the trainer dies, one adapter fails and the other finishes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from e2e.runs import run_training
from e2e.slow_loss import GATE


def status_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "status.json").read_text())


def records_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_failing_adapter_stops_alone_and_dead_trainer_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gate := tmp_path / "gate").mkdir()
    (gate / "hold").touch()
    monkeypatch.setenv(GATE, str(gate))
    settings = {
        "config": "tests/e2e/several_adapters.toml",
        "pythonpath": '["tests"]',
        "checkpoint__interval": 2,
        "validation__num_prompts": 1,
        "validation__samples_per_prompt": 1,
    }
    with run_training(tmp_path, adapters__works__training__loss="e2e.slow_loss:slow_grpo", **settings) as run:
        run.wait_for((gate / "held").exists)  # the trainer is in the first step of "works"
        os.kill(run.child("trainer"), signal.SIGKILL)
        (gate / "hold").unlink()
        assert run.wait() == 1, run.output
        assert run.output.count("works: trainer is running again after") == 1
        adapters = run.folder / "adapters"
        assert "breaks: failed at step 2, and the others continue" in run.output
        assert "1 of 2 adapters failed: breaks: 2 steps were skipped" in run.output
        assert status_of(adapters / "works")["state"] == "finished"
        for folder in (adapters / "breaks", run.folder):
            assert status_of(folder)["state"] == "failed"
            assert "steps were skipped, and training.max_skipped_steps = 1" in status_of(folder)["reason"]
        steps = [record for record in records_of(adapters / "works") if "train/loss" in record]
        assert [record["step"] for record in steps] == [1, 2, 3]
        assert all(record["sync/unverified_share"] == 0 for record in steps)
        assert all(record["sync/probe_diff"] <= 1e-5 for record in steps)
        last = run.metrics()[-1]
        assert (last["adapter/works/step"], last["adapter/works/failed"], last["adapter/breaks/failed"]) == (3, 0, 1)
        shares = [last[f"adapter/{name}/trainer_share"] for name in ("works", "breaks")]
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(1)
        assert (adapters / "works" / "export" / "config.json").is_file()
        assert run.leftovers() == []

        run.resume()
        assert run.wait() == 0, "skipped steps are counted from the resume on"
        assert "works: all steps were trained before" in run.output
        assert "breaks: continuing from" in run.output
        for name in ("works", "breaks"):
            assert re.search(rf"adapter {name} +3 steps; validation reward \d.* before, \d.* after", run.output)
        assert f"titan-rl eval {adapters / 'works'}" in run.output
        assert status_of(adapters / "breaks")["state"] == status_of(run.folder)["state"] == "finished"
