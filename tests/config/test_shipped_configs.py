from __future__ import annotations

from pathlib import Path

import pytest

from titan_rl.config.load import dump_config, load_config

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "examples").glob("*/*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_shipped_config_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path, check_files=False)
    again = tmp_path / "resolved.toml"
    again.write_text(dump_config(config))

    assert load_config(again, check_files=False) == config
