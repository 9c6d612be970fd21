"""The settings that docs/adapters.md shows are read as they stand, with the libraries that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_rl import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adapters.md").read_text()
BASE = [("model.path", str(ROOT / "examples" / "alphabet_sort" / "base")), ("model.max_context", "256")]


def settings_of(section: str) -> list[str]:
    """The TOML files that a section of the page shows."""
    _, _, text = PAGE.partition(f"\n## {section}\n")
    return re.findall(r"```toml\n(.*?)```", text.partition("\n## ")[0], re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_reasoning_gym(number: int, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(settings_of("reasoning-gym")[number])
    task = load_config(tmp_path / "run.toml", BASE).tasks[0].task
    assert task.train_sample(0, 0) == task.train_sample(0, 0)
    assert len(task.validation_samples(3)) == 3
