from __future__ import annotations

import json
from pathlib import Path

import pytest

from titan_rl.core.calls.imports import import_module, require
from titan_rl.core.errors import ConfigError, MissingExtraError


def test_require_imports_an_installed_module():
    assert require("json", "cpu") is json


def test_missing_module_error_names_the_extra():
    with pytest.raises(MissingExtraError, match=r"absent_stack is not installed; run: pip install .*\[cpu\]"):
        require("absent_stack.engine", "cpu")


def test_missing_dependency_of_a_module_is_reported_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needs_more.py").write_text("import absent_dependency")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModuleNotFoundError, match="absent_dependency") as caught:
        require("needs_more", "cpu")
    assert not isinstance(caught.value, MissingExtraError)


def test_import_error_names_the_failing_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unlucky_module.py").write_text("x = 1\n\n\ny = x.absent\n")
    with pytest.raises(ConfigError, match=r"unlucky_module failed: AttributeError: .* \(unlucky_module.py:4 in"):
        import_module("unlucky_module")
