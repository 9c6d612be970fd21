"""`titan-rl export` without the weights, which tests/e2e/test_checkpoint.py reads and writes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from peft_files import write_adapter

from titan_rl.cli.main import main
from titan_rl.core.errors import CheckpointError
from titan_rl.evaluation.policies import policy_export
from titan_rl.run.journal.state import RunState

EXAMPLE = Path(__file__).parents[2] / "examples" / "alphabet_sort"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run with two checkpoints and a newer export."""
    folder = tmp_path / "run"
    for step in (3, 12):
        checkpoint = folder / "checkpoints" / f"step-{step:06}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "run_state.json").write_text("{}")
    settings = (EXAMPLE / "cpu.toml").read_text().replace('path = "base"', f'path = "{EXAMPLE / "base"}"')
    (folder / "config.toml").write_text(settings)
    (folder / "export").mkdir()
    return folder


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls that would write weights: the dtype, the checkpoint and the target folder."""
    calls: list[tuple[Any, ...]] = []

    async def export(model: Any, checkpoint: Path, directory: Path, log: Path, *, as_adapter: bool = False) -> None:
        if checkpoint.name == "step-000003":
            raise CheckpointError("damaged")
        assert not as_adapter
        calls.append((model.dtype, checkpoint.name, directory))

    monkeypatch.setattr(policy_export, "export_weights", export)
    return calls


def test_newest_checkpoint_is_exported(
    run: Path, tmp_path: Path, written: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert written == [("bfloat16", "step-000012", tmp_path / "out")]
    printed = capfd.readouterr()
    assert printed.out == f"{tmp_path / 'out'}\n"
    assert f"step 12 of {run} is written and verified" in printed.err


def test_best_checkpoint_is_exported(
    run: Path, tmp_path: Path, written: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-000003").rename(run / "checkpoints" / "step-000006")
    state = RunState(step=12, held_out={0: 0.1, 3: 0.99, 6: 0.9, 12: 0.4})
    state.write(run / "checkpoints" / "step-000012")
    assert main(["export", str(run), str(tmp_path / "out"), "--best"]) == 0
    assert [name for _, name, _ in written] == ["step-000006"], "the best one that is kept"
    assert f"step 6 of {run} is written and verified" in capfd.readouterr().err
    assert main(["export", str(run / "checkpoints" / "step-000012"), str(tmp_path / "other"), "--best"]) == 2
    assert "is not a run, of which --best chooses a checkpoint; leave --best out" in capfd.readouterr().err
    RunState(step=12).write(run / "checkpoints" / "step-000012")
    assert main(["export", str(run), str(tmp_path / "other"), "--best"]) == 2
    assert f"no checkpoint of {run} was validated" in capfd.readouterr().err


def test_named_checkpoint_is_exported(
    run: Path, tmp_path: Path, written: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run / "checkpoints" / "step-000003"), str(tmp_path / "out")]) == 1
    assert "damaged" in capfd.readouterr().err
    assert main(["export", str(run / "checkpoints" / "step-000012"), str(tmp_path / "out")]) == 0
    assert written == [("float32", "step-000012", tmp_path / "out")]


def test_export_rejects_anything_but_runs_and_checkpoints(
    run: Path, tmp_path: Path, written: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(run / "export")]) == 2
    assert "is not overwritten" in capfd.readouterr().err
    shutil.rmtree(run / "checkpoints")
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "has no checkpoint yet" in capfd.readouterr().err
    assert main(["export", str(EXAMPLE / "base"), str(tmp_path / "out")]) == 2
    assert "is neither a run nor a checkpoint" in capfd.readouterr().err
    adapter = write_adapter(tmp_path / "adapter")
    assert main(["export", str(adapter), str(tmp_path / "out")]) == 2
    assert "is neither a run nor a checkpoint" in capfd.readouterr().err
    assert not written


def test_unwritable_output_folder_is_rejected(
    run: Path, tmp_path: Path, written: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), str(tmp_path / "file" / "out")]) == 2
    assert f"{tmp_path / 'file'} is not writable" in capfd.readouterr().err
    (tmp_path / "link").symlink_to("gone")
    assert main(["export", str(run), str(tmp_path / "link")]) == 2
    assert "link already exists and is not overwritten" in capfd.readouterr().err
    assert written == []
