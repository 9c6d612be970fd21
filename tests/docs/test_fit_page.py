"""The page of the memory of public models has the figures that the library computes."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from scripts.write_fit_docs import PAGE, page


def test_the_page_of_memory_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python -m scripts.write_fit_docs"
