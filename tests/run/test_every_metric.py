"""Metric table: it has an entry for every metric that the code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel
from test_controller import Rig as SmallRig
from test_killed_mix import TASKS
from test_killed_run import Rig
from test_tasks_of_a_run import SUITES

from scripts.write_metric_docs import PAGE, page
from titan_rl import Completion, EngineLoop, FinishReason, LocalReplica, Rollout, RolloutGroup, Turn, VersionSpan
from titan_rl.cluster.hosts.lifecycle import HostHistory, HostStatus
from titan_rl.cluster.liveness.health_check import ProcessorTime
from titan_rl.cluster.processes.roles import Role
from titan_rl.config.run import RunConfig
from titan_rl.config.sections import ValidationConfig
from titan_rl.generation.scripted_engine import ScriptedEngine
from titan_rl.generation.types import GaugeSummary
from titan_rl.metrics.table import METRICS, find_metric, match_metric
from titan_rl.run.directory import read_jsonl
from titan_rl.run.observability.processor_meter import ProcessorMeter
from titan_rl.run.observability.step_metrics import group_metrics, prefixed, validation_metrics
from titan_rl.run.several_adapters import RunMetrics
from titan_rl.run.sft.loop import LOGGED
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.serving.http.exchange import ServerMetrics

PACKAGE = Path(__file__).parents[2] / "titan_rl"


def strings(path: str, function: str, pattern: str = r"[a-z_]+") -> set[str]:
    """Return the string constants of a function that cannot run without an engine or torch."""
    (found,) = [
        node
        for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    ]
    texts = {node.value for node in ast.walk(found) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if re.fullmatch(pattern, text)}


def code_metrics() -> set[str]:
    """Return the metrics of the trainer, the generators, vLLM and titan-rl sft."""
    trainer = strings("training/trainer.py", "train") | strings("training/tensor_batch.py", "packing_metrics")
    trainer |= strings("training/objective.py", "token_metrics")
    trainer |= strings("cluster/trainer_actor.py", "_train") & {"idle_s"}
    trainer |= strings("training/critic.py", "judge") & {"explained_variance"}
    gauges = strings("generation/vllm_engine.py", "gauges")
    values = {name: 1.0 for name in gauges if not name.endswith("_total")}
    totals = {name.removesuffix("_total"): 1.0 for name in gauges if name.endswith("_total")}
    return {
        *prefixed("train", dict.fromkeys([*trainer, *LOGGED], 0.0)),
        *prefixed("engine", GaugeSummary.metrics([GaugeSummary(1, values, values, totals)])),
        *prefixed("sync", dict.fromkeys(strings("cluster/generator_actor.py", "pull"), 0.0)),
        *prefixed("sync", dict.fromkeys(strings("weights/transports/tcp.py", "_note"), 0.0)),
        *strings("run/stages/league.py", "metrics", r"[a-z]+/[a-z_]+"),
        *strings("run/observability/generation_status.py", "_moved_metrics", r"[a-z]+/[a-z_]+"),
        *(f"completion/{name}" for name in strings("generation/request.py", "_continued_metrics")),
        *(text for text in strings("run/sft/loop.py", "_train_on", r"[a-z]+/[a-z_]+")),
        *(text for text in strings("run/sft/loop.py", "_measure", r"[a-z]+/[a-z_]+")),
        *re.findall(r"^# HELP (?!\w+_created )(\w+?)(?:_total)? ", ServerMetrics().text().decode(), re.M),
    }


def game_and_agent_metrics() -> set[str]:
    """Return the metrics that only games and agents have."""
    of_some = ("retries", "close_failed", "branches", "completion_tokens", "teacher_seconds", "teacher_kl")
    metrics = {"completion_tokens": 1.0}
    completion = Completion(
        "r", [9], [-0.5], FinishReason.STOP, [VersionSpan(0, 1)], metrics=metrics, allowed_logprobs=[-0.1]
    )
    rollout = Rollout("g/0", "g", 0, None, turns=[Turn([1], completion)], reward=1.0, seat="first")
    rollout.metrics |= dict.fromkeys(of_some, 1.0)
    group = RolloutGroup("g", None, [rollout])
    validations = [validation_metrics([group, group], prefix) for prefix in ("validation", "validation/hard")]
    return {*group_metrics([group]), *(name for metrics in validations for name in metrics)}


def host_metrics() -> set[str]:
    history = HostHistory()
    history.note([HostStatus(name, "", "in the run") for name in ("h1", "h2")], {"h1": 0.25})
    return set(history.take_metrics())


def processor_metrics() -> set[str]:
    class Processes:
        num_cores = 1

        def processor_times(self) -> dict[Role, ProcessorTime]:
            return {role: ProcessorTime() for role in Role}

    return set(ProcessorMeter(Processes()).take_metrics())


def adapter_metrics() -> set[str]:
    written = dict[str, float]()

    class Sink:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            written.update(metrics)

        def close(self) -> None: ...

    RunMetrics(Sink(), FairTurns(["names"]), {"names": 0}).reached("names", 1)
    return set(written)


async def run_metrics(folder: Path) -> set[str]:
    """Return the metrics of a run with several tasks and suites, and of an engine with gauges."""
    validation = ValidationConfig(num_prompts=4, samples_per_prompt=2, suites=SUITES)
    await Rig(folder, 0, tasks=TASKS, steps=6, validation=validation, max_staleness=0).run()
    loop = EngineLoop(lambda: ScriptedEngine(script=lambda context: context[-1] - 1))
    await loop.start()
    small = SmallRig(folder / "small", steps=2, replica=LocalReplica("engine", loop, lambda version: []))
    await small.run()
    await loop.close()
    records = [*read_jsonl(folder / "metrics.jsonl"), *(metrics for _, metrics in small.records)]
    return {name for record in records for name in record} - {"step", "time_s"}


async def test_metric_table_matches_the_written_metrics(tmp_path: Path):
    written = (
        await run_metrics(tmp_path)
        | code_metrics()
        | game_and_agent_metrics()
        | host_metrics()
        | processor_metrics()
        | adapter_metrics()
    )
    assert len(written) > 200
    found = {name: find_metric(name) for name in written}
    assert sorted(name for name, metric in found.items() if metric is None) == []
    rewards_of_tasks_here = re.compile(r"(rollout|validation(/\w+)?)/reward/turns")
    own = [n for n, metric in found.items() if metric and metric.is_open and not rewards_of_tasks_here.fullmatch(n)]
    assert own == [], "each of the library's own metrics has its own entry"
    matched = {metric.name for metric in found.values() if metric}
    assert [metric.name for metric in METRICS if not metric.is_open and metric.name not in matched] == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("task/sums/dropped/a/b c", "task/<task>/dropped/<reason>"),
        ("task/status/share", "task/<task>/share"),
        ("validation/status/completed", "validation/status/completed"),
        ("validation/hard/reward_mean", "validation/<suite>/reward_mean"),
        ("validation/hard/completion/queue_s", "validation/<suite>/completion/queue_s"),
        ("validation/exploitability", "validation/<measure>"),
        ("rollout/reward/seconds/x", "rollout/reward/<reward>"),
        ("engine/queue_tokens_mean", "engine/<gauge>_mean"),
        ("completion/my_metric", "completion/<metric>"),
        ("hosts/node-1.cluster/silence_s", "hosts/<host>/silence_s"),
        ("scheduling/age/-1", "scheduling/age/<age>"),
    ],
)
def test_find_metric_prefers_the_most_specific_entry(name: str, entry: str):
    metric = find_metric(name)
    assert metric is not None
    assert metric.name == entry


def test_match_metric_returns_placeholder_values():
    match = match_metric("validation/hard/reward/in place")
    assert match is not None
    assert (match.metric.name, match.labels) == (
        "validation/<suite>/reward/<reward>",
        {"suite": "hard", "reward": "in place"},
    )


def test_find_metric_returns_none_for_unknown_names():
    assert [find_metric(name) for name in ("train/los", "task/share", "loss", "", "step")] == [None] * 5


def test_validation_metrics_reuse_the_help_of_rollout_metrics():
    metric = find_metric("validation/hard/turns_mean")
    assert metric is not None
    help = "Mean number of turns per rollout. Measured on held-out samples."
    assert (metric.help, metric.group) == (help, "Validation")


def test_metric_entries_are_complete_and_name_existing_settings():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    tables = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    for metric in METRICS:
        for sentence in (metric.help, metric.normal, metric.otherwise):
            assert not sentence or sentence.endswith("."), metric.name
            for table, setting in re.findall(r"(?<![\w/.])([a-z]+)\.([a-z_]+)\b", sentence):
                if isinstance(model := tables.get(table), type) and issubclass(model, BaseModel):
                    assert setting in model.model_fields, f"{metric.name} names {table}.{setting}"
            for other in re.findall(r"\b(?:rollout|train|sync|time|scheduling|task|throughput)/[\w/<>]*\w>?", sentence):
                assert find_metric(re.sub(r"[<>]", "", other)) is not None, f"{metric.name} names {other}"


def test_metric_docs_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python scripts/write_metric_docs.py"
