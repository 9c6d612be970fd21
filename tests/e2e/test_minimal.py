"""The minimal example trains on real generations in one process."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")
pytest.importorskip("vllm", reason="needs the cpu or gpu extra")

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.py"


def test_minimal_example_trains_for_two_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps=2", "--groups-per-step=4", "--group-size=4"])
    runpy.run_module("examples.minimal", run_name="__main__")
    output = capsys.readouterr().out
    steps = re.findall(r"^step (\d)/2  reward (\S+)  tokens (\d+)  loss (\S+)", output, re.MULTILINE)
    assert [step for step, *_ in steps] == ["1", "2"]
    for _, reward, tokens, _ in steps:
        assert 0 < float(reward) < 1
        assert int(tokens) > 16


def test_minimal_example_is_at_most_120_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 120
