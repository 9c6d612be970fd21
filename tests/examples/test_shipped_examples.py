"""Dry run of every example's settings, with a tiny model instead of its base model."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_rl.config.load import load_config
from titan_rl.core.console import LOG
from titan_rl.run.dry_run import play_dry_run
from titan_rl.training.tiny_model import make_tiny_model

EXAMPLES = sorted(path.parent.name for path in Path("examples").glob("*/cpu.toml"))
EXAMPLES.remove("agent")  # played by a program, which a dry run does not start


@pytest.mark.parametrize("name", EXAMPLES)
def test_dry_run_of_shipped_example(name: str, tmp_path: Path) -> None:
    path = Path("examples", name, "cpu.toml")
    make_tiny_model(tmp_path / "base", texts=(), level="byte", parameters=100_000, max_context=2048)
    made = [("model.max_context", "2048"), ("training.row_tokens", "4096")]  # bytes are more tokens than words
    made += [(key, str(tmp_path / "base")) for key in ("model.path", "training.teacher")]
    assert play_dry_run(load_config(path, made if name == "distillation" else made[:-1]), LOG)


def test_dry_run_of_agents_starts_no_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("asyncio.create_subprocess_exec", None)
    assert play_dry_run(load_config("examples/agent/cpu.toml"), LOG) == []
