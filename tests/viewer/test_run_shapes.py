"""Verdicts on runs of known shapes: they are those of a person, and the page, the report and the terminal agree."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from viewer.run_shapes import SHAPES, write_shape

from titan_rl.run.observability.summary import RunSummary, show_summary
from titan_rl.viewer.runs import RunReader


def summary_of(folder: Path) -> dict[str, Any]:
    """Summary of a run on the page and in the report."""
    with contextlib.closing(RunReader(folder)) as reader:
        return reader.summary()


def shown_in_terminal(folder: Path) -> str:
    shown = io.StringIO()
    show_summary(RunSummary(0.1, 0.2, 1, 1, 1.0, folder), shown)
    return " ".join(shown.getvalue().split())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_page_and_terminal_give_the_verdict_of_a_person(tmp_path: Path, name: str, seed: int) -> None:
    shape = SHAPES[name]
    summary = summary_of(write_shape(tmp_path / name, shape, seed=seed))
    verdict, *reasons = summary["verdicts"]
    text = f"{verdict['title']}. {verdict['text']}"
    assert shape.says.lower() in text.lower(), text
    assert verdict["tone"] == shape.tone, text
    everything = json.dumps([verdict, reasons, summary["warnings"]])
    assert not shape.never or shape.never not in everything
    assert verdict["title"] in shown_in_terminal(tmp_path / name)
