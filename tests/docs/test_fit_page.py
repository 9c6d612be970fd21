"""The page on the memory of public models contains the figures that the library computes."""

from __future__ import annotations

import pytest
from depth import in_depth

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from scripts.write_fit_docs import MODELS, PAGE, page, trainer_rows

HOW_TO_UPDATE = "run: .venv/bin/python -m scripts.write_fit_docs"


def test_rows_of_the_smallest_model_are_current() -> None:
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    smallest = next(iter(MODELS))
    assert [row for row in trainer_rows({smallest: MODELS[smallest]}) if row not in lines] == [], HOW_TO_UPDATE


@in_depth
def test_memory_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), HOW_TO_UPDATE
