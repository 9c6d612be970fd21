"""Resuming a run of several adapters whose folders are damaged: a dry run finds all that the resume would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from peft_files import BASE

from titan_rl.cli.main import main
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.errors import TitanRLError
from titan_rl.run.directory import RunDirectory
from titan_rl.run.resumption import begin_run, find_resumptions, open_run_dir
from titan_rl.run.several_adapters import ExperimentsSession
from titan_rl.training.state.checkpoint import step_directory, write_checksums, write_summed

SEVERAL = "examples/alphabet_sort/several.toml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was stopped after step 20 of each of its adapters."""
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.write_config(config)
    begin_run(config, run_dir)
    for name, each in config.experiments.items():
        own = RunDirectory(run_dir.path / "adapters" / name)
        (own.path / "config.toml").write_text(dump_config(each))
        state = replace(begin_run(each, own).state, step=20, next_index=320)
        folder = step_directory(own.checkpoints, 20)
        folder.mkdir()
        text = json.dumps(asdict(state))
        write_checksums(folder, {"run_state.json": write_summed(folder / "run_state.json", text)})
        run_dir.write_metrics(20, {f"adapter/{name}/step": 20.0})
    run_dir.close()
    return run_dir.path


def dry_run(run: Path, capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = main(["train", "--resume", str(run), "--dry-run", *options])
    return code, capfd.readouterr().err


def resume(run: Path) -> None:
    """The beginning of a resume, before its processes start."""
    config = load_config(run / "config.toml")
    session = ExperimentsSession(
        config, open_run_dir(config, run), begins=False, started_by=None, command="train", processes=None
    )
    session.run(lambda session, resources: pytest.fail("its processes started"))


def remove_all(run: Path) -> None:
    shutil.rmtree(run / "adapters")


def remove_one(run: Path) -> None:
    shutil.rmtree(run / "adapters" / "gspo")


def remove_state(run: Path) -> None:
    (run / "adapters" / "gspo" / "run_state.json").unlink()


def file_for_one(run: Path) -> None:
    remove_one(run)
    (run / "adapters" / "gspo").touch()


def file_for_all(run: Path) -> None:
    remove_all(run)
    (run / "adapters").touch()


def link_for_export(run: Path) -> None:
    (run / "adapters" / "gspo" / "export").symlink_to("elsewhere")


def link_for_one(run: Path) -> None:
    (run / "adapters" / "gspo").rename(run.parent / "gspo")
    (run / "adapters" / "gspo").symlink_to(run.parent / "gspo")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_all, "adapters/grpo is gone, and the run has trained 20 steps of adapter 'grpo'; restore the folder"),
        (remove_one, "adapters/gspo is gone, and the run has trained 20 steps of adapter 'gspo'; restore the folder"),
        (remove_state, "adapters/gspo has no run_state.json, and the run has trained 20 steps of adapter 'gspo'"),
        (file_for_one, "adapters/gspo must be a folder"),
        (file_for_all, "adapters must be a folder"),
        (link_for_export, "gspo/export is a link to elsewhere, and links in a run's folder are not followed"),
        (link_for_one, "adapters/gspo is a link to "),
    ],
)
def test_damaged_folder_of_an_adapter_is_found_by_a_dry_run_and_by_the_resume(
    run: Path, damage: Callable[[Path], None], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    code, err = dry_run(run, capfd)
    assert code != 0
    assert message in err
    with pytest.raises(TitanRLError, match=message.replace("(", r"\(")):
        resume(run)


def test_whole_run_may_resume_and_an_adapter_with_an_empty_folder_begins_again(run: Path) -> None:
    config = load_config(run / "config.toml")
    run_dir = open_run_dir(config, run)
    assert set(find_resumptions(config, run_dir)) == set(config.experiments)
    remove_one(run)
    (run / "adapters" / "gspo").mkdir()
    assert set(find_resumptions(config, run_dir)) == set(config.experiments) - {"gspo"}


def test_damaged_checkpoint_of_an_adapter_is_found_by_a_dry_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "adapters/gspo/checkpoints/step-000020/run_state.json").write_text("{}")
    code, err = dry_run(run, capfd)
    assert code != 0
    assert "step-000020/run_state.json is damaged" in err


def test_finished_schedule_of_an_adapter_names_the_option_that_continues_it(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (run / "config.toml").read_text()
    assert text.count('lr_decay = "constant"') == 1
    (run / "config.toml").write_text(text.replace('lr_decay = "constant"', 'lr_decay = "linear"'))
    for state in run.rglob("run_state.json"):
        state.write_text(state.read_text().replace('"training.lr_decay": "constant"', '"training.lr_decay": "linear"'))
        if state.parent.name.startswith("step-"):
            write_checksums(state.parent, {state.name: write_summed(state, state.read_text())})
    steps = load_config(run / "config.toml").experiments["gspo"].training.steps
    code, err = dry_run(run, capfd, f"--adapters.gspo.training.steps={2 * steps}")
    assert code == 2
    assert f"adapters.gspo.training.steps = {2 * steps}, and the learning rate decays over {steps} steps" in err
    assert f"--adapters.gspo.training.decay_steps={steps} to continue" in err
    more = [("adapters.gspo.training.steps", f"{2 * steps}"), ("adapters.gspo.training.decay_steps", f"{steps}")]
    find_resumptions(load_config(run / "config.toml", more), RunDirectory(run))
