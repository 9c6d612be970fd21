"""The page about chats is generated from the templates in the tests."""

from __future__ import annotations

import pytest

pytest.importorskip("trl", reason="needs the dev extra")
pytest.importorskip("renderers")

from scripts.write_chat_docs import PAGE, page


def test_chat_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python -m scripts.write_chat_docs"
