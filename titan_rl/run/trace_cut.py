"""Cuts the traces of a run back to where it goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from titan_rl.core.calls.parsing import parse_json
from titan_rl.run.json_lines import cut_records


class _Event(msgspec.Struct, gc=False):
    ph: str
    ts: float | None = None


def cut_traces(folder: Path, step: int) -> None:
    """Leave out what began after the loop had begun with the first step after this one, which is run again."""
    controller = folder / "controller.jsonl"
    if not controller.exists():
        return
    with controller.open("rb") as file:
        until = min((began for line in file if (began := _began(line, step)) is not None), default=None)
    if until is None:
        return

    for path in folder.glob("*.jsonl"):
        cut_records(path, _Event, lambda event: event.ph == "M" or (event.ts is not None and event.ts < until))


def _began(line: bytes, step: int) -> float | None:
    """When a stage of a step that is run again began; None of other lines."""
    if b'"step"' not in line:
        return None
    try:
        event = parse_json(line)
        return event["ts"] if event["args"]["step"] > step else None
    except (ValueError, KeyError, TypeError):
        return None
