"""`report.html`: contains a run up to a size limit, lists what was left out, and needs no network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_run import line, write_run
from titan_rl.viewer.report import write_report


def data_of(page: str) -> dict[str, Any]:
    """Parse the embedded data of a report."""
    (found,) = re.findall(r'<script type="application/json" id="run-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def report(folders: list[Path], **settings: int) -> tuple[str, dict[str, Any]]:
    page = write_report(folders, folders[0] / "report.html", **settings).read_text(encoding="utf-8")
    return page, data_of(page)


def test_report_contains_a_small_run_completely(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=20, rollouts=48)
    page, data = report([folder])
    assert not re.search(r'(?:src|href)="(?!data:)', page), "the report needs no network"
    assert data["left_out"] == []
    (run,) = data["runs"]
    assert (run["id"], run["steps"], run["state"]) == ("run", 20, "finished")
    of = data["of"]["run"]
    assert len(of["rollouts"]["rows"]) == len(of["rollouts"]["records"]) == 48
    lines = [json.loads(text) for text in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [of["rollouts"]["records"][str(row["index"])] for row in of["rollouts"]["rows"]] == lines
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert of["curves"]["train/loss"]["values"] == losses
    assert of["summary"]["config"] == (folder / "config.toml").read_text()


def test_report_over_the_size_limit_omits_whole_groups_and_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=400, rollouts=800)
    page, data = report([folder], most_bytes=300_000)
    assert len(page) - len(report([write_run(tmp_path / "empty", steps=0, rollouts=0)])[0]) < 600_000
    kept = data["of"]["run"]["rollouts"]["rows"]
    assert 0 < len(kept) < 800
    assert len(kept) % 8 == 0, "siblings belong together"
    steps = {row["step"] for row in kept}
    assert min(steps) <= 2
    assert max(steps) >= 399
    assert any(f"{len(kept)} of 800 rollouts" in text for text in data["left_out"])
    assert any("points" in text for text in data["left_out"])


def test_report_of_a_failed_run_gives_the_reason(tmp_path: Path) -> None:
    _, data = report([write_run(tmp_path / "run", steps=3, rollouts=8, state="failed")])
    assert data["runs"][0]["state"] == "failed"
    assert "the loss is nan" in data["of"]["run"]["summary"]["failure"]


@pytest.mark.parametrize("hostile", ["</script><b>&", "<!--", "\u2028", "]]>"])
def test_hostile_text_does_not_end_the_embedded_data(tmp_path: Path, hostile: str) -> None:
    record = {"step": 1, "rollout_id": "g/0", "group_id": "g", "messages": [{"role": hostile, "content": hostile}]}
    (tmp_path / "rollouts.jsonl").write_bytes(line(record))
    (tmp_path / "config.toml").write_text(f"a = 1 # {hostile}")
    _, data = report([tmp_path])
    of = data["of"][tmp_path.name]
    assert of["rollouts"]["records"]["0"]["messages"] == record["messages"]
    assert of["summary"]["config"].endswith(hostile)


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[training]\nlr = inf\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": NaN, "train/loss": Infinity}\n')
    (tmp_path / "rollouts.jsonl").write_text('{"rollout_id": "g/0", "reward": -Infinity, "advantage": 1e999}\n')
    _, data = report([tmp_path])
    of = data["of"][tmp_path.name]
    assert of["curves"]["train/loss"]["values"] == [None]
    assert of["rollouts"]["records"]["0"] == {"rollout_id": "g/0", "reward": None, "advantage": None}
    assert of["rollouts"]["rows"][0]["reward"] is None


def test_report_of_an_empty_folder(tmp_path: Path) -> None:
    _, data = report([tmp_path])
    assert data["of"][tmp_path.name]["rollouts"] == {"rows": [], "records": {}}


def test_several_runs_share_the_size_limit(tmp_path: Path) -> None:
    _, data = report([write_run(tmp_path / name, steps=5, rollouts=16) for name in ("a", "b")], most_bytes=30_000)
    assert [run["id"] for run in data["runs"]] == ["a", "b"]
    assert any(text.startswith("b: ") for text in data["left_out"])


def test_prompts_over_time_are_kept_under_the_size_limit(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=400, rollouts=800)
    with (folder / "rollouts.jsonl").open("ab") as file:
        for step in range(0, 400, 20):
            for sibling in range(4):
                messages = [{"role": "user", "content": "Sort: Bo, Al"}, {"role": "assistant", "content": "Al, Bo"}]
                labels = {"step": step, "phase": "validation", "task": "sort", "group_id": "validation-0"}
                ids = {"rollout_id": f"validation-0/{sibling}", "sibling": sibling}
                file.write(line({**labels, **ids, "status": "completed", "reward": sibling / 4, "messages": messages}))
    _, data = report([folder], most_bytes=300_000)
    of = data["of"]["run"]
    assert of["prompts"]["same"]
    (prompt,) = of["prompts"]["prompts"]
    assert len(prompt["steps"]) == 12
    assert (prompt["steps"][0]["step"], prompt["steps"][-1]["step"]) == (0, 380)
    for at in prompt["steps"]:
        record = of["rollouts"]["records"][str(at["index"])]
        assert (record["step"], record["reward"]) == (at["step"], at["reward"]) == (at["step"], 0.25)
