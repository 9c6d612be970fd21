"""`report.html`: the page for some runs, as one file that needs neither a server nor a network."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.core.files import replace_file
from titan_rl.viewer.html import report_page
from titan_rl.viewer.metric_columns import described
from titan_rl.viewer.runs import RunReader, describe_runs, with_adapters
from titan_rl.viewer.timeline import small_timeline

MAX_BYTES = 10_000_000
"""Size limit of the data in a report in bytes, however large the runs are."""

MAX_CURVE_POINTS = 1000
_LEAST_CURVE_POINTS = 50
_POINT_BYTES = 60
_ROW_BYTES = 400
_TIMELINE_SHARE = 0.15
_CURVES_SHARE = 0.3
_PROMPTS_SHARE = 0.2
_MORE = "titan-rl view shows all of them"


def write_report(
    folders: Sequence[Path], out: Path, *, most_bytes: int = MAX_BYTES, patience_s: float = math.inf
) -> Path:
    """Write the page of `make_report` in one step, without following a link at `out`.

    Raises:
        OSError: The file cannot be written.
    """
    replace_file(out, [make_report(folders, most_bytes=most_bytes, patience_s=patience_s)])
    return out


def make_report(folders: Sequence[Path], *, most_bytes: int = MAX_BYTES, patience_s: float = math.inf) -> bytes:
    """Make the page of some runs and of their adapters. Missing files of a run do not matter.

    Args:
        most_bytes: Approximate limit of the data in bytes. The page says what is left out.
        patience_s: Longest time for which a run's rollouts are read, in seconds. The others are left out.
    """
    all_runs: dict[str, Path] = {}
    for folder in folders:
        all_runs |= with_adapters(str(folder) if folder.name in all_runs else folder.name, folder)
    data: dict[str, Any] = {"runs": describe_runs(all_runs, folders), "left_out": [], "of": {}}
    for run, folder in all_runs.items():
        with contextlib.closing(RunReader(folder, searches=False)) as reader:
            data["of"][run], left_out = _data_of(reader, most_bytes // len(all_runs), patience_s)
        data["left_out"] += left_out if len(all_runs) == 1 else [f"{run}: {text}" for text in left_out]
    return report_page(data, ", ".join(folder.name for folder in folders))


def _data_of(reader: RunReader, most_bytes: int, patience_s: float) -> tuple[dict[str, Any], list[str]]:
    """Collect the data of a run for `EmbeddedSource`, and notes on what is left out."""
    left_out: list[str] = []
    names = [metric["name"] for metric in described(reader.columns())]
    room = int(_CURVES_SHARE * most_bytes / (_POINT_BYTES * max(1, len(names))))
    points = min(MAX_CURVE_POINTS, max(_LEAST_CURVE_POINTS, room))
    curves = reader.curves([*names, "time_s"], points, -math.inf, math.inf)
    if any("low" in curve for curve in curves.values()):
        left_out.append(f"curves have {points} points each, with the least and the greatest value between them")
    spent = sum(_POINT_BYTES * len(curve["steps"]) for curve in curves.values())
    phases, indexed = reader.count_groups(patience_s)
    if indexed < 1:
        left_out.append(f"only the first {indexed:.0%} of the rollouts file was read; {_MORE}")
    shown = small_timeline(reader.traces, int(_TIMELINE_SHARE * most_bytes))
    if shown is not None:
        shown["bottleneck"] = reader.summary()["bottleneck"]
        spent += int(_TIMELINE_SHARE * most_bytes)
    prompts = reader.prompts()
    kept = _rollouts(reader, phases, prompts, most_bytes - spent)
    total = reader.num_rollouts
    if len(kept) < total:
        left_out.append(f"{len(kept):,} of {total:,} rollouts are included, from steps far apart; {_MORE}")
    data = {
        "summary": reader.summary(),
        "metrics": {"metrics": described(reader.columns())},
        "timeline": shown,
        "curves": curves,
        "prompts": _kept_prompts(prompts, kept),
        "rollouts": {"rows": reader.rows(list(kept)), "records": kept},
    }
    return data, left_out


def _rollouts(
    reader: RunReader, phases: Mapping[str, int], prompts: Mapping[str, Any], most_bytes: int
) -> dict[int, msgspec.Raw]:
    """Choose records by index: the median rollouts of prompts in a share of the room, and whole groups from steps that
    are as far apart as possible."""
    kept: dict[int, msgspec.Raw] = {}
    spent = 0
    lines = prompts["prompts"]
    for index in sorted(range(len(lines)), key=lambda index: index != prompts["median"]):
        for step in lines[index]["steps"]:
            line = reader.rollout(step["index"])
            if line is not None and spent + len(line) + _ROW_BYTES <= _PROMPTS_SHARE * most_bytes:
                kept[step["index"]] = msgspec.Raw(line)
                spent += len(line) + _ROW_BYTES
    for phase, index in _spread(phases):
        group = reader.group(phase, index)
        found = {i: line for i in group if i not in kept and (line := reader.rollout(i)) is not None}
        size = sum(len(line) + _ROW_BYTES for line in found.values())
        if spent + size > most_bytes:
            break
        spent += size
        kept |= {index: msgspec.Raw(line) for index, line in found.items()}
    return kept


def _kept_prompts(prompts: Mapping[str, Any], kept: Mapping[int, msgspec.Raw]) -> dict[str, Any]:
    """Keep the prompts of which at least two steps are in the report."""
    steps = [[step for step in line["steps"] if step["index"] in kept] for line in prompts["prompts"]]
    indices = [index for index, found in enumerate(steps) if len(found) > 1]
    lines = [{**prompts["prompts"][index], "steps": steps[index]} for index in indices]
    median = indices.index(prompts["median"]) if prompts["median"] in indices else 0 if lines else None
    return {"same": prompts["same"], "prompts": lines, "median": median}


def _spread(phases: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Iterate over the groups of each phase: the last, the first, then those that halve the gaps. Phases take turns.

    Args:
        phases: Number of groups of each phase.
    """
    in_turn = zip_longest(*(_halving(count) for count in phases.values()))
    return ((phase, index) for turn in in_turn for phase, index in zip(phases, turn, strict=True) if index is not None)


def _halving(count: int) -> Iterator[int]:
    """Iterate over the indices of a list so that each prefix is spread over it. `[*_halving(5)]` is `[4, 0, 2, 1,
    3]`."""
    if not count:
        return
    yield count - 1
    if count > 1:
        yield 0
    gaps = [(0, count - 1)]
    while gaps:
        halved: list[tuple[int, int]] = []
        for first, last in gaps:
            if last - first > 1:
                middle = (first + last) // 2
                yield middle
                halved += [(first, middle), (middle, last)]
        gaps = halved
