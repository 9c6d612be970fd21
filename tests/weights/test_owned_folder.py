"""Owned folders that another process cleans up between any two steps of their owner."""

import os
import tempfile
from pathlib import Path

import pytest

from titan_rl.weights.shard_files import OwnedFolder, clean_dead_folders


@pytest.mark.parametrize("after", ["mkdtemp", "open"])
def test_folder_removed_before_locking_is_created_again(tmp_path: Path, monkeypatch, after: str) -> None:
    module = tempfile if after == "mkdtemp" else os
    step = getattr(module, after)
    cleaned: list[Path] = []

    def then_cleaned(*arguments: object, **keywords: object) -> object:
        result = step(*arguments, **keywords)
        if not cleaned:
            monkeypatch.undo()
            cleaned.extend(clean_dead_folders("mine-", tmp_path))
        return result

    monkeypatch.setattr(module, after, then_cleaned)
    folder = OwnedFolder("mine-", tmp_path)
    assert len(cleaned) == 1
    assert list(tmp_path.iterdir()) == [folder.path]
    assert clean_dead_folders("mine-", tmp_path) == []
    folder.remove()
    assert list(tmp_path.iterdir()) == []
