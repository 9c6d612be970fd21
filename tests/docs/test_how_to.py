"""Tests shown in the docs run as written, with the modules that the same page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from background import HANG_S
from docs.pages import PAGES, ROOT, files

SHOWN = {page: files(page) for page in PAGES if page.parent.name == "how_to" or page.stem == "tutorial"}
WITH_TESTS = [page for page, found in SHOWN.items() if any(name.startswith("test_") for name in found)]


@pytest.mark.slow
def test_tests_shown_on_all_pages_pass(tmp_path: Path) -> None:
    assert {page.stem for page in WITH_TESTS} >= {
        "engine",
        "loss",
        "mocks",
        "python",
        "strategy",
        "tasks",
        "transport",
        "tutorial",
    }
    for page in WITH_TESTS:
        (tmp_path / page.stem).mkdir()
        for name, text in SHOWN[page].items():
            (tmp_path / page.stem / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", tmp_path],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
