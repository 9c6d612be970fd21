"""Word problems: rows, demonstrations, and grading of the final number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chatting import mean_demonstrated, play

from examples.gsm8k import write_problems
from examples.gsm8k.reward import is_right
from examples.gsm8k.task import WordProblems

FOLDER = Path(write_problems.__file__).parent


def task(**settings: Any) -> WordProblems:
    settings = {"prompt": "question", "reward": "examples.gsm8k.reward:is_right", **settings}
    return WordProblems(path=str(FOLDER / "problems.jsonl"), **settings)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("9 + 6 = 15\n#### 15", 1.0),
        ("#### 15.0 pears", 1.0),
        ("That makes 1,500 / 100, so 15.", 1.0),
        ("15\n#### 16", 0.0),
        ("fifteen", 0.0),
        ("", 0.0),
    ],
)
def test_marked_or_last_number_is_graded(answer: str, reward: float) -> None:
    assert is_right({"answer": "9 + 6 = 15\n#### 15"}, answer) == reward


def test_latex_is_graded_with_math_verify() -> None:
    pytest.importorskip("math_verify")
    assert is_right({"answer": "#### 0.5"}, r"It is $\boxed{\frac{1}{2}}$") == 1.0
    assert is_right({"answer": "#### 0.5"}, r"It is $\boxed{\frac{1}{3}}$") == 0.0


def test_row_without_a_number_raises_value_error() -> None:
    with pytest.raises(ValueError, match="has no number"):
        is_right({"answer": "many"}, "5")


def test_problems_file_matches_the_script_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_problems.main()
    assert capsys.readouterr().out == (FOLDER / "problems.jsonl").read_text()


async def test_reference_answers_are_graded_right() -> None:
    row = task().train_sample(0, 0)
    assert (await play(task(), row, lambda messages: row["answer"])).reward == 1.0
    rows = [json.loads(line) for line in (FOLDER / "problems.jsonl").read_text().splitlines()]
    assert all(is_right(row, row["answer"]) for row in rows)


async def test_demonstration_accuracy_follows_careless() -> None:
    assert await mean_demonstrated(task(), 20) == 1.0
    assert 0.2 < await mean_demonstrated(task(careless=0.7), 200, carelessly=True) < 0.4
