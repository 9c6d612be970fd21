"""Summary of a run: its progress, its cost and its problems; and its entry in the list of runs."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.config.settings_reference import as_toml, defaults
from titan_rl.config.tasks import name_of
from titan_rl.core.calls.parsing import parse_toml
from titan_rl.core.files import as_list, as_table, file_status, last_lines, read_file, read_json
from titan_rl.core.plain_data import plain_json
from titan_rl.core.run_files import STATUS, read_hosts, read_results, read_status
from titan_rl.metrics.table import find_metric
from titan_rl.metrics.waterfall import AVAILABLE, STEPS, USED, waterfall
from titan_rl.viewer.changes import HELD_OUT, RECENT, Change, held_out_change, least_change, step_noise
from titan_rl.viewer.metric_columns import MetricColumns
from titan_rl.viewer.verdicts import EARNED, LOSSES, Verdict, num_skipped, task_lines, verdicts

Tile = dict[str, str]


def summarize(folder: Path, columns: MetricColumns, warnings: list[str]) -> dict[str, Any]:
    """Make the answer to /api/runs/{id}/summary.

    Returns:
        headline: Metrics that measure a run of games better than its mean reward: the win rate in a league, the task's
            measures in self-play whose rewards add up to 0. {"title", "metrics": labels by name, "note"}; None for
            other runs.
        tiles: List of {"label", "value", "note", "tone": "good", "bad" or ""}.
        verdicts: List of verdicts; see `verdicts`.
        tasks: List of tasks; see `task_lines`. Each also has "faults", the share of its latest rollouts that were lost
            to faults; None if unknown.
        trend: Change of the measurement on held-out samples, {"metric", "before", "after", "first_step", "last_step",
            "error", "direction" of a change that counts, or 0, "count" of measurements}; None if there were not two
            measurements, or if several suites have their own trends.
        cores: The `waterfall` of a mean step, [{"name", "seconds", "share"}], with shares that add up to 1.
        hosts: Hosts of the run; see `read_hosts`.
        failure: Reason why the run failed, for a person; None if it did not fail.
        seconds_left: Remaining time of a run in progress at the pace of its latest steps, in seconds; None if unknown.
        warnings: List of texts.
        config: Content of the settings file, as TOML.
        settings: Settings by dotted names; see `settings_of`.
        defaults: Defaults, as TOML, of the settings that differ from them.
    """
    status, config = read_status(folder), read_config(folder)
    planned = steps_planned(config)
    results = read_results(folder)
    tasks = task_lines(columns, tasks_of(config))
    for task in tasks:
        task["faults"] = _recent_mean(columns, f"task/{task['name']}/finished_fault_fraction")
    found = (held_out_change(columns, name) for name in (HELD_OUT, LOSSES[0]))
    trend = next((change for change in found if change is not None), None)
    return {
        "headline": _headline(columns),
        "tiles": [
            *_tiles(columns),
            *_tiles_of_cost(folder, config),
            *_tiles_of_settings(config),
            *_tiles_of_evaluation(results),
        ],
        "warnings": [
            *status.changes,
            *warnings,
            *_missing_parts(folder, columns, config),
            *_warnings_of_evaluation(results),
        ],
        "verdicts": judge(columns, config),
        "tasks": tasks,
        "trend": trend and {**asdict(trend), "direction": trend.direction, "count": columns.count(trend.metric)},
        "cores": [*_cores(columns)],
        "hosts": read_hosts(folder),
        "failure": status.reason if status.state == "failed" else None,
        "seconds_left": _seconds_left(columns, planned) if status.state == "running" else None,
        "config": config_text(folder),
        "settings": settings_of(folder),
        "defaults": _other_defaults(settings_of(folder)),
    }


def judge(columns: MetricColumns, config: Mapping[str, Any]) -> list[Verdict]:
    """Make the verdicts on a run, for the page and for the terminal; see `verdicts`.

    Args:
        config: Settings of the run.
    """
    dtype = as_table(config.get("model")).get("dtype")
    return verdicts(columns, task_lines(columns, tasks_of(config)), str(dtype or "float32"))


def settings_of(folder: Path) -> dict[str, Any]:
    """Return a run's settings by dotted names: {"training.lr": 0.0003, "tasks.0.name": "sums"}."""
    return dict(_flat(read_config(folder), ""))


def _other_defaults(settings: Mapping[str, Any]) -> dict[str, str]:
    known = defaults()
    keys = {name: re.sub(r"^(tasks|adapters|validation\.suites)\.\d+\.", r"\1.NAME.", name) for name in settings}
    found = {name: known[key] for name, key in keys.items() if key in known}
    return {name: default for name, default in found.items() if as_toml(settings[name]) != default}


def _missing_parts(folder: Path, columns: MetricColumns, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about files of a run that are missing, or end early."""
    run = describe_run(folder)
    if run["kind"] == "evaluation" or not (folder / STATUS).exists():
        return
    settings = folder / "config.toml"
    if not config and not settings.is_symlink():
        problem = "cannot be read" if settings.exists() else "is missing"
        yield f"config.toml {problem}: settings, tasks and the number of planned steps are unknown"
    ends_early = any(as_table(as_table(config.get("training")).get("stop_at")).values())
    is_whole = run["state"] == "finished" and run["kind"] == "train" and not ends_early
    saved = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdecimal()]
    trained = max([*saved, (run["steps_planned"] or 0) if is_whole else 0])
    last = int(max((columns.points(name)[-1][0] for name in columns), default=0))
    if last < trained:
        yield f"the metrics end at step {last} of {trained}: the rest of metrics.jsonl is missing"


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Flatten settings. Lists of tables get their indices as names. Times, nan and inf, which JSON lacks, become
    text."""
    table, items = as_table(value), as_list(value)
    parts: list[tuple[Any, Any]]
    if isinstance(value, dict):
        parts = list(table.items())
    elif any(isinstance(one, dict) for one in items):
        parts = list(enumerate(items))
    else:
        is_json = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        yield name, value if is_json else plain_json(items) if isinstance(value, list) else str(value)
        return
    for key, part in parts:
        yield from _flat(part, f"{name}.{key}" if name else str(key))


LEAGUE = "league/win_rate"
_ZERO_SUM = 0.1  # largest sum of the seats' rewards, as a share of their sizes, that counts as a game with sum zero


def _headline(columns: MetricColumns) -> dict[str, Any] | None:
    if columns.count(LEAGUE):
        note = "The mean reward depends on the opponents that the league chooses."
        return {"title": "Win rate against earlier versions", "metrics": {LEAGUE: "win rate"}, "note": note}
    seats = {match[1]: name for name in columns if (match := _SEAT.fullmatch(name))}
    rewards = [*zip(*map(columns.values, seats.values()), strict=False)]
    size = sum(sum(map(abs, step)) for step in rewards)
    if len(seats) < 2 or sum(abs(sum(step)) for step in rewards) > _ZERO_SUM * size:
        return None
    note = "The policy plays all seats, and their rewards add up to 0: the mean reward says nothing."
    measures = {match[1]: name for name in columns if _is_measure(name) and (match := _HELD_OUT.fullmatch(name))}
    title = "Measures of the task on held-out games" if measures else "Reward by seat"
    return {"title": title, "metrics": {name: label for label, name in (measures or seats).items()}, "note": note}


_SEAT = re.compile(r"rollout/seat/([^/]+)/reward_mean")
_HELD_OUT = re.compile(r"validation/(.+)")


def _is_measure(name: str) -> bool:
    metric = find_metric(name)
    return metric is not None and metric.name.endswith("<measure>")


def _tiles(columns: MetricColumns) -> Iterator[Tile]:
    if rates := columns.values(LEAGUE):
        versions = columns.values("league/versions")
        note = f"against {versions[-1]:.0f} earlier versions" if versions else "against earlier versions"
        yield _tile("Win rate", f"{fmean(rates[-RECENT:]):.1%}", note, "good" if rates[-1] > 0.5 else "")
    for name in EARNED:
        if values := columns.values(name):
            recent, before = fmean(values[-RECENT:]), values[-2 * RECENT : -RECENT]
            note, tone = "last step" if len(values) == 1 else f"last {min(len(values), RECENT)} steps", ""
            if before:
                error = step_noise(values) * math.sqrt(1 / len(before) + 1 / RECENT)
                change = Change(name, fmean(before), recent, 0, 0, error, least_change(columns, name))
                note += f"; {change.gain:+.3f} on the {len(before)} before"
                tone = {1: "good", 0: "", -1: "bad"}[change.direction]
            faults = _recent_mean(columns, "rollout/finished_fault_fraction")
            note += f"; without {faults:.1%} lost to faults" if faults else ""
            yield _tile("Reward", f"{recent:.3f}", note, tone)
            break
    speeds, seconds = columns.values("throughput/tokens_per_s"), columns.values("time/step_s")
    if speeds and len(speeds) == len(seconds):
        trained = math.fsum(speed * each for speed, each in zip(speeds, seconds, strict=True))
        yield _tile("Tokens trained on", f"{trained:,.0f}", f"{fmean(speeds):,.0f} a second")
    if seconds:
        note = f"mean of the last {min(len(seconds), RECENT)}" if len(seconds) > 1 else ""
        yield _tile("Time of a step", f"{fmean(seconds[-RECENT:]):.2f} s", note)
    if staleness := columns.values("train/staleness_mean"):
        most = max(columns.values("train/staleness_max"), default=max(staleness))
        yield _tile("Staleness", f"{fmean(staleness[-RECENT:]):.2f}", f"steps; {most:.0f} at most")
    if lengths := columns.values("rollout/completion_tokens_mean"):
        yield _tile("Length of a rollout", f"{fmean(lengths[-RECENT:]):,.0f}", f"tokens; {lengths[0]:,.0f} at first")
    if errors := columns.values("rollout/finished_errors"):
        count, of = math.fsum(errors), math.fsum(columns.values("rollout/finished_rollouts"))
        yield _tile("Rollouts with an error", f"{count:,.0f}", f"of {of:,.0f}", "bad" if count > 0.1 * of else "")
    if skipped := num_skipped(columns.values("train/skipped_steps")):
        yield _tile("Skipped steps", f"{skipped:,.0f}", "no finite loss or gradient: see the rollouts dropped", "bad")
    if losses := columns.values("train/loss") if not columns.count(EARNED[1]) else []:
        yield _tile("Loss", f"{fmean(losses[-RECENT:]):.4f}", f"{losses[0]:.4f} at first")


def _recent_mean(columns: MetricColumns, name: str) -> float | None:
    recent = columns.values(name)[-RECENT:]
    return fmean(recent) if recent else None


def _cores(columns: MetricColumns) -> Iterator[dict[str, Any]]:
    sums = {name: math.fsum(columns.values(name)) for name in (AVAILABLE, *USED, *STEPS) if columns.count(name)}
    parts = waterfall(sums)
    total = math.fsum(parts.values())
    for name, seconds in parts.items():
        yield {"name": name, "seconds": seconds / columns.count(AVAILABLE), "share": seconds / total}


def _tiles_of_cost(folder: Path, config: Mapping[str, Any]) -> Iterator[Tile]:
    """Make the tile of the processes that each hold a device, and of the time for which they do."""
    run = describe_run(folder)
    training, generation = as_table(config.get("training")), as_table(config.get("generation"))
    ranks = math.prod(_count(training.get(f"{kind}_parallel"), 1) for kind in ("data", "context", "tensor"))
    engines = _count(generation.get("num_generators"), 0) if run["kind"] == "train" else 0
    wide = _count(generation.get("tensor_parallel_size"), 1)
    if training and run["kind"] != "evaluation":
        processes = ranks + engines * wide
        held = f"{ranks} trainer rank{'' if ranks == 1 else 's'}"
        if engines:
            held += f", {engines} engine{'' if engines == 1 else 's'}" + (f" of {wide}" if wide > 1 else "")
        hours = run["seconds"] * processes / 3600
        figure = f"{hours:,.2f}" if hours < 100 else f"{hours:,.0f}"
        note = f"{held}; {figure} process hours"
        yield _tile("Processes held", f"{processes} for {_duration(run['seconds'])}", note)


def _duration(seconds: float) -> str:
    """Format a duration. Example: 3725 s becomes "1 h 2 min"."""
    rounded = round(seconds)
    hours, minutes = divmod(rounded // 60, 60)
    parts = {"h": hours, "min": minutes, "s": 0 if hours else rounded % 60}
    return " ".join(f"{count} {unit}" for unit, count in parts.items() if count) or "0 s"


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def _tiles_of_settings(config: Mapping[str, Any]) -> Iterator[Tile]:
    if as_table(config.get("validation")).get("num_prompts") == 0:
        yield _tile("Held-out reward", "off", "validation.num_prompts = 0")


def _tiles_of_evaluation(results: Mapping[str, Any]) -> Iterator[Tile]:
    for name, task in as_table(results.get("tasks")).items():
        reward = as_table(as_table(task).get("reward"))
        if isinstance(reward.get("mean"), int | float):
            error, faults = reward.get("standard_error"), as_table(task).get("num_faults")
            notes = [f"± {error:.3f}"] if isinstance(error, int | float) else []
            distinct, prompts = (as_table(task).get(name) for name in ("num_distinct", "num_prompts"))
            notes += [f"{distinct} distinct of {prompts} prompts"] if distinct != prompts else []
            notes += [f"without {faults} samples lost to faults"] if faults else []
            yield _tile(f"Reward of {name}", f"{reward['mean']:.3f}", "; ".join(notes))


def _warnings_of_evaluation(results: Mapping[str, Any]) -> Iterator[str]:
    for name, task in as_table(results.get("tasks")).items():
        for note in ("repeated_prompts", "unreached_success"):
            if isinstance(text := as_table(task).get(note), str):
                yield f"{name}: {text}"


def _tile(label: str, value: str, note: str = "", tone: str = "") -> Tile:
    return {"label": label, "value": value, "note": note, "tone": tone}


def _seconds_left(columns: MetricColumns, planned: int | None) -> float | None:
    seconds, points = columns.values("time/step_s"), columns.points("time/step_s")
    if not seconds or planned is None:
        return None
    return max(0.0, planned - points[-1][0]) * fmean(seconds[-RECENT:])


def describe_run(folder: Path) -> dict[str, Any]:
    """Make an entry of /api/runs, without its id."""
    status, config, record = read_status(folder), read_config(folder), _last_record(folder)
    results = read_results(folder)
    steps = record.get("step", results.get("version", 0))
    seconds = record.get("time_s", results.get("seconds", 0.0))
    if status.state == "running":
        seconds = max(_number(seconds), time.time() - max([status.began, *status.resumed]))
    return {
        "name": folder.name,
        "kind": "evaluation" if results else "sft" if (folder / "supervised.json").exists() else "train",
        "state": status.state,
        "reason": status.reason,
        "waits_for": status.waits_for,
        "steps": int(_number(steps)),
        "steps_planned": steps_planned(config),
        "began": status.began,
        "resumed": status.resumed,
        "ended": status.ended,
        "seconds": _number(seconds),
        "tasks": tasks_of(config) or list(results.get("tasks", ())),
    }


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a run; empty if they cannot be read."""
    path = folder / "config.toml"
    try:
        status = file_status(path)
        return _parsed(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError):
        return {}


@lru_cache(1024)
def _parsed(path: Path, mtime_ns: int, size: int) -> Mapping[str, Any]:
    """Parse settings. Cached, because hundreds of runs are looked at twice a second and settings hardly ever change."""
    return parse_toml(read_file(path).decode())


def config_text(folder: Path) -> str:
    try:
        return read_file(folder / "config.toml").decode(errors="replace")
    except OSError:
        return ""


def steps_planned(config: Mapping[str, Any]) -> int | None:
    """Number of steps in the settings, of all adapters together; None if there is none, as for an evaluation."""
    common = as_table(config.get("training")).get("steps")
    adapters = [as_table(as_table(table).get("training")) for table in as_list(config.get("adapters"))]
    given = [table.get("steps", common) for table in adapters] or [common]
    steps = [each for each in given if isinstance(each, int)]
    return sum(steps) if len(steps) == len(given) else None


def tasks_of(config: Mapping[str, Any]) -> list[str]:
    """Names of a run's tasks."""
    tables = map(as_table, as_list(config.get("tasks")) or [config.get("task")])
    return [
        str(table.get("name") or name_of(str(table["type"]).rpartition(":")[2])) for table in tables if "type" in table
    ]


def _last_record(folder: Path) -> Mapping[str, Any]:
    """Last readable line of the metrics."""
    path = folder / "metrics.jsonl"
    try:
        status = file_status(path)
    except OSError:
        return {}
    return _last_step(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(1024)
def _last_step(path: Path, inode: int, size: int, mtime_ns: int) -> Mapping[str, Any]:
    for line in last_lines(path):
        record = read_json(line)
        if record is not None and isinstance(record.get("step"), int | float):
            return record
    return {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
