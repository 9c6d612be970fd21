"""Sinks with their real packages: the metrics of a run that each package receives."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from background import HANG_S
from own_venv import asked_for, python_with
from prometheus_client.parser import text_string_to_metric_families

from titan_rl.core.console import LOG, ConsoleLines
from titan_rl.core.errors import MissingExtraError
from titan_rl.metrics.sinks.registry import BY_NAME, find_sink, sample
from titan_rl.metrics.sinks.settings import NAMES, LoggingConfig
from titan_rl.metrics.sinks.types import MetricSink, SinkSpec
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.sinks import open_sinks

ROOT = Path(__file__).parents[2]


def test_settings_and_registry_name_the_same_sinks():
    assert tuple(BY_NAME) == NAMES
    assert set(NAMES) - set(LoggingConfig.model_fields) == {"tensorboard"}, "which has no settings"


def test_sink_without_its_package_is_rejected_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with (
        pytest.raises(MissingExtraError, match=r"titan-rl\[trackio\]"),
        open_sinks(LoggingConfig(sinks=("trackio",)), RunDirectory(tmp_path), LOG),
    ):
        pytest.fail("the run begins")


def test_tensorboard_has_every_step_once_after_a_resume(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    console = ConsoleLines()
    run_dir = RunDirectory(tmp_path)
    run_dir.config.write_text("seed = 3\n")
    for begins, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with open_sinks(LoggingConfig(sinks=("tensorboard",)), run_dir, console, step=begins) as sinks:
            for step in steps:
                sinks.log(step, {"train/loss": step + begins / 10})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.2),
        (4, 4.2),
    ]
    assert b"seed = 3" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert console == [f"TensorBoard: tensorboard --logdir {tmp_path / 'tensorboard'}"] * 2


def test_wandb_offline_writes_a_run_with_its_steps_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    options = {"project": "sums", "group": "first", "tags": ["small"], "mode": "offline"}
    console = ConsoleLines()
    with open_sinks(LoggingConfig(sinks=("wandb",), wandb=options), RunDirectory(tmp_path / "r1"), console) as sinks:
        sinks.log(1, {"rollout/reward_mean": 0.25})
        sinks.log(1, {"validation/reward_mean": 0.75})
    assert console == []
    (file,) = (tmp_path / "r1").glob("wandb/offline-run-*/*.wandb")
    records, ends = list(read_wandb(file)), time.monotonic() + HANG_S
    while sum(isinstance(record, list) for record in records) < 2 and time.monotonic() < ends:
        time.sleep(0.1)  # wandb's own process writes the file
        records = list(read_wandb(file))
    history = [dict(row) for row in records if isinstance(row, list)]
    assert [(row["step"], row.get("rollout/reward_mean"), row.get("validation/reward_mean")) for row in history] == [
        (1, 0.25, None),
        (1, None, 0.75),
    ]
    (run,) = [record for record in records if isinstance(record, dict)]
    assert run == {"project": "sums", "group": "first", "tags": ["small"], "id": "r1"}


def read_wandb(file: Path) -> Iterator[list[tuple[str, object]] | dict[str, object]]:
    """Yield rows of the history as lists, and the run as a dict."""
    from wandb.proto import wandb_internal_pb2

    data, position = file.read_bytes(), 7  # after the header
    while position + 7 <= len(data):  # a log of LevelDB: checksum, length and kind of each part
        _, length, kind = struct.unpack_from("<IHB", data, position)
        assert kind in (0, 1), "the records here fit in a block"
        if position + 7 + length > len(data):
            return  # still being written
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[position + 7 : position + 7 + length])
        position += 7 + length
        if record.HasField("history"):
            yield [(item.key or "/".join(item.nested_key), json.loads(item.value_json)) for item in record.history.item]
        elif record.HasField("run"):
            run = record.run
            yield {"project": run.project, "group": run.run_group, "tags": list(run.tags), "id": run.run_id}


def scraped(url: str) -> dict[str, dict[str, float]]:
    """Return the value of each family by its labels, without the run label."""
    with urllib.request.urlopen(url, timeout=120) as answer:
        text = answer.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            labels = ",".join(
                f"{name}={value}" for name, value in sorted(one.labels.items()) if name != "run" and value
            )
            found.setdefault(one.name, {})[labels] = one.value
            assert one.labels["run"] == "a-run"
    return found


def test_prometheus_exposes_the_newest_values_with_tasks_as_labels(tmp_path: Path):
    console = ConsoleLines()
    settings = LoggingConfig(prometheus="127.0.0.1:0")
    sink = find_sink("prometheus").make(SinkSpec("a-run", tmp_path, settings, 0, console))
    (line,) = console
    url = line.removeprefix("Prometheus: ")
    assert url.startswith("http://127.0.0.1:")
    try:
        assert scraped(url) == {}
        sink.log(1, {"rollout/reward_mean": 0.25, "task/sums/reward_mean": 0.5, "scheduling/dropped/too_old": 2.0})
        sink.log(2, {"rollout/reward_mean": 0.75, "task/vowels/reward_mean": 1.0})
        sink.log(2, {"validation/reward_mean": 0.5, "validation/hard/reward_mean": 0.25, 'own/"odd" name\n': 3.0})
        found = scraped(url)
    finally:
        sink.close()
    assert found.pop("titan_rl_record_timestamp_seconds")[""] > 1.7e9
    assert found == {
        "titan_rl_step": {"": 2.0},
        "titan_rl_rollout_reward_mean": {"": 0.75},
        "titan_rl_task_reward_mean": {"task=sums": 0.5, "task=vowels": 1.0},
        "titan_rl_scheduling_dropped": {"reason=too_old": 2.0},
        "titan_rl_validation_reward_mean": {"": 0.5, "suite=hard": 0.25},
        "titan_rl_own_odd_name": {"": 3.0},
    }
    with pytest.raises(OSError, match="refused"):
        scraped(url)


def test_seat_metrics_are_samples_of_one_prometheus_family():
    first, second = sample("rollout/seat/a/reward_mean", 1.0), sample("rollout/seat/b/reward_mean", 2.0)
    assert (first.family, first.labels, second.labels) == (
        "titan_rl_rollout_seat_reward_mean",
        {"seat": "a"},
        {"seat": "b"},
    )


def test_occupied_prometheus_port_is_reported_and_the_run_continues(tmp_path: Path):
    console = ConsoleLines()
    settings = LoggingConfig(prometheus="127.0.0.1:0")
    first = find_sink("prometheus").make(SinkSpec("a-run", tmp_path, settings, 0, console))
    port = int(console.pop().split(":")[-1].partition("/")[0])
    same = LoggingConfig(sinks=("prometheus",), prometheus=f"127.0.0.1:{port}")
    with open_sinks(same, RunDirectory(tmp_path / "r"), console) as sinks:
        sinks.log(1, {"train/loss": 0.5})
    first.close()
    assert len(console) == 1
    assert console[0].startswith("opening Prometheus failed, and the run continues without it: OSError")
    assert (tmp_path / "r" / "metrics.jsonl").read_text().count("train/loss") == 1


def open_list(spec: SinkSpec) -> object:
    KEPT.append(spec.step)
    return SimpleNamespace(log=lambda step, metrics: KEPT.append((step, metrics)), close=lambda: KEPT.append("closed"))


def open_nothing(spec: SinkSpec) -> object:
    return spec


KEPT: list[object] = []


def test_user_function_can_be_a_sink(tmp_path: Path):
    console = ConsoleLines()
    settings = LoggingConfig(sinks=(f"{__name__}:open_list", f"{__name__}:open_nothing"))
    with open_sinks(settings, RunDirectory(tmp_path), console, step=4) as sinks:
        sinks.log(5, {"train/loss": 0.5})
    assert KEPT == [4, (5, {"train/loss": 0.5}), "closed"]
    assert len(console) == 1
    assert "which is not a MetricSink: it needs log and close" in console[0]


def test_documented_sink_writes_csv_rows(tmp_path: Path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how_to" / "sinks.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    sink = names["open_csv"](SinkSpec("run", tmp_path, LoggingConfig()))
    assert isinstance(sink, MetricSink)
    sink.log(3, {"train/loss": 0.5, "train/lr": 1.0})
    sink.close()
    assert (tmp_path / "metrics.csv").read_text().split() == ["3,train/loss,0.5", "3,train/lr,1.0"]


@asked_for
def test_trackio_has_all_steps_of_a_resumed_run(request: pytest.FixtureRequest, tmp_path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["optional-dependencies"]["trackio"], *project["dependencies"]]
    python = python_with(request.config.cache, "trackio", *needs)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "trackio")}
    program = ROOT / "tests" / "metrics" / "programs" / "trackio_run.py"
    run = subprocess.run(
        [python, program, tmp_path], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert run.returncode == 0, run.stderr
    (stored,) = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert stored == {"rows": [[1, 0.25], [2, 0.5], [3, 0.75]], "console": ["trackio: trackio show --project sums"] * 2}
