"""The page of model families is that of the tests."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from scripts.write_model_docs import PAGE, page


def test_the_page_of_model_families_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python -m scripts.write_model_docs"
