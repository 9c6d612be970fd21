"""Validation of an adapter concurrent with training is identical to one that training waits for, with real engines.
`test_train.py` covers validation of a full model."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

from depth import in_depth
from e2e.runs import run_training

STEPS = 3


def results(folder: Path, **settings: Any) -> tuple[list[dict[str, float]], Any]:
    """Metrics and completions of the validations of a run at staleness 0."""
    folder.mkdir()
    short: dict[str, Any] = {"generation__num_generators": 2, "scheduling__max_staleness": 0, "training__steps": STEPS}
    with run_training(
        folder,
        **short,
        training__adapter__rank=2,
        validation__interval=1,
        logging__transcripts_per_step=8,
        **settings,
    ) as run:
        assert run.wait() == 0, run.output
        assert "training waits for the validation" not in run.output
        records = run.metrics()
        lines = (run.folder / "rollouts.jsonl").read_text().splitlines()
    played = [line for line in map(json.loads, lines) if line["phase"] == "validation"]
    played.sort(key=lambda line: (line["step"], line["rollout_id"]))
    metrics = [
        {name: value for name, value in record.items() if not name.endswith(("_s", "seconds", "in_flight"))}
        for record in sorted(records, key=lambda record: record["step"])
        if "validation/reward_mean" in record
    ]
    metrics = [{n: v for n, v in each.items() if n == "step" or n.startswith("validation/")} for each in metrics]
    texts = [(line["step"], line["rollout_id"], line["reward"], line["messages"]) for line in played]
    return metrics, texts


@in_depth
def test_concurrent_validation_matches_blocking_validation(tmp_path: Path):
    waits = results(tmp_path / "waits")
    assert [record["step"] for record in waits[0]] == list(range(STEPS + 1))
    held: dict[str, Any] = {"validation__beside_training": "true"}
    assert results(tmp_path / "shards", **held, rollout__num_workers=1) == waits
    assert results(tmp_path / "held", **held) == waits
    assert results(tmp_path / "pinned", generation__adapter_swap="pinned") == waits
