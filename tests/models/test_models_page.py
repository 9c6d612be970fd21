"""The page of model families is generated from the test results."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torchtitan", reason="needs the cpu or gpu extra")

from models.families import ENGINE_PROBLEMS, FAMILIES, REPLAY_PROBLEMS, RESULTS, model_type

from scripts.write_model_docs import PAGE, page
from titan_rl.training.models.families import RECURRENT


def test_model_families_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: .venv/bin/python -m scripts.write_model_docs"


def test_results_fail_only_for_known_problems() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results.keys() == FAMILIES.keys()
    for name, by_check in results.items():
        expected = {"b"} if name in ENGINE_PROBLEMS else set[str]()
        expected |= {"g"} if name in REPLAY_PROBLEMS else set()
        expected |= {"h"} if model_type(name) in RECURRENT else set()
        assert {check for check, found in by_check.items() if found == "no"} == expected, (
            f"{name}: run make test-models"
        )
