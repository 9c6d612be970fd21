"""Fixtures of the model families, and recording of check results in tests/models/results.json, from which
`scripts/write_model_docs.py` generates docs/reference/models.md."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from models.families import ALL, FAMILIES, RESULTS, SELECTED, make_family

_results: defaultdict[str, dict[str, str]] = defaultdict(dict)  # "yes", "no" or "-", by family and check


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
    check, callspec = item.get_closest_marker("check"), getattr(item, "callspec", None)
    if check is not None and callspec is not None and (report.when == "call" or report.failed):
        outcome = "-" if report.skipped else "yes" if report.passed else "no"
        if dict(item.user_properties).get("works") is False:
            outcome = "no"  # the test expects the failure
        _results[callspec.params["name"]][check.args[0]] = outcome
    return report


def pytest_sessionfinish() -> None:
    """Write the results, keeping those of checks that did not run."""
    if ALL and _results:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))
        merged = {name: before.get(name, {}) | _results[name] for name in FAMILIES}
        lines = (f"  {json.dumps(name)}: {json.dumps(merged[name], sort_keys=True)}" for name in FAMILIES)
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
