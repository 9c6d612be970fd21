"""Results of the tests of model families, by family and check, for the table in docs/reference/models.md."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from models.families import ALL, SELECTED, make_family

RESULTS = os.environ.get("TITAN_RL_MODEL_RESULTS")
"""File to which results are added, one JSON object a line."""


@pytest.fixture(scope="module", params=SELECTED)
def name(request: pytest.FixtureRequest) -> str:
    """Name of a family in `FAMILIES`."""
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model of the family."""
    return make_family(name, tmp_path_factory.mktemp("family") / "model")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    check = item.get_closest_marker("check")
    callspec = getattr(item, "callspec", None)
    if RESULTS and ALL and check is not None and callspec is not None and report.when == "call":
        reason = getattr(report, "wasxfail", None)
        found = {"family": callspec.params["name"], "check": check.args[0], "outcome": report.outcome, "reason": reason}
        with Path(RESULTS).open("a") as file:
            file.write(json.dumps(found) + "\n")
    return report
