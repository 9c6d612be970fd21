"""Resuming a stopped run: checks of its settings, its checkpoint and its files."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from user_project import project, write_tensors

from titan_rl.config.load import load_config
from titan_rl.config.resume_changes import settings_of
from titan_rl.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from titan_rl.core.model_identity import model_identity
from titan_rl.rollout.types import RolloutGroup
from titan_rl.run.directory import RunDirectory, read_jsonl
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import DataPosition, RunState
from titan_rl.run.json_lines import cut_records
from titan_rl.run.resumption import resume_from_newest
from titan_rl.run.session import EndMessages
from titan_rl.scheduling.task_mix import Assigned
from titan_rl.training.state.checkpoint import list_checkpoints, step_directory, write_checksums, write_summed

__all__ = ["project"]


@pytest.fixture
def run_dir(project: Path) -> RunDirectory:
    """A run of 5 steps whose newest checkpoint is of step 3, stopped in step 5."""
    config = load_config("config.toml")
    run_dir = RunDirectory.create(config)
    RunState(settings=settings_of(config)).write(run_dir.path)
    for step in (1, 3):
        folder = step_directory(run_dir.checkpoints, step)
        folder.mkdir()
        state = RunState(step, 100, 0.5, 4 * step, (4 * step - 1,), settings_of(config))
        save(folder, json.dumps(asdict(state)))
    for step in range(5):
        run_dir.write_metrics(step, {"train/loss": float(step)})
        run_dir.write_rollout({"step": step, "phase": "train", "messages": [{"role": "user", "content": "\u00e9"}]})
        dropped = {"group_id": f"train-{4 * step}", "phase": "train", "dropped": "too_old"}
        run_dir.write_rollout({"step": step + 1} | dropped)
    run_dir.close()
    return run_dir


def save(folder: Path, run_state: str) -> None:
    write_checksums(folder, {"run_state.json": write_summed(folder / "run_state.json", run_state)})


def resume(run_dir: RunDirectory, *overrides: tuple[str, str]):
    return resume_from_newest(load_config(run_dir.config, overrides), run_dir)


def edit(run_dir: RunDirectory, before: str, after: str) -> None:
    text = run_dir.config.read_text()
    assert text.count(before) == 1
    run_dir.config.write_text(text.replace(before, after))


def test_resume_uses_the_newest_checkpoint_and_its_data_position(run_dir):
    start = resume(run_dir)
    assert start.checkpoint == step_directory(run_dir.checkpoints, 3)
    assert (start.state.step, start.state.next_index, start.state.unsettled) == (3, 12, (11,))


@pytest.fixture
def known_model_run(run_dir: RunDirectory) -> RunDirectory:
    """`run_dir` whose states all have the identity of its model."""
    identity = model_identity(Path("policy"))
    inputs = {"models": {"model.path": identity}}
    replace(RunState.read(run_dir.path), inputs=inputs).write(run_dir.path)
    for folder in list_checkpoints(run_dir.checkpoints):
        save(folder, json.dumps(asdict(replace(RunState.read(folder), inputs=inputs))))
    return run_dir


def other_weights() -> None:
    write_tensors(Path("policy/model.safetensors"), "model.embed_tokens.weight", "another.weight")


def test_unchanged_model_may_be_moved(known_model_run: RunDirectory):
    shutil.copytree("policy", "elsewhere")
    other_weights()
    start = resume(known_model_run, ("model.path", "elsewhere"))
    assert not start.losses
    assert start.state.inputs["models"]["model.path"] == model_identity(Path("elsewhere"))


def test_changed_initial_weights_are_reported_when_a_checkpoint_exists(known_model_run):
    other_weights()
    (loss,) = resume(known_model_run).losses
    assert "policy' has other weights than the run began with; those of" in loss
    assert "step-000003" in loss


def test_changed_initial_weights_are_rejected_without_a_checkpoint(known_model_run):
    shutil.rmtree(known_model_run.checkpoints)
    other_weights()
    with pytest.raises(CheckpointError, match=r"policy' is not .*: weights changed, .* no checkpoint .*--model.path"):
        resume(known_model_run)


def test_changed_initial_weights_are_rejected_with_a_kl_penalty(known_model_run):
    config = load_config(known_model_run.config, [("training.kl_coef", "0.1")])
    for folder in (known_model_run.path, *list_checkpoints(known_model_run.checkpoints)):
        state = replace(RunState.read(folder), settings=settings_of(config))
        save(folder, json.dumps(asdict(state))) if folder != known_model_run.path else state.write(folder)
    known_model_run.write_config(config)
    resume(known_model_run)
    other_weights()
    with pytest.raises(CheckpointError, match=r"training.kl_coef = 0.1 holds the policy to them"):
        resume(known_model_run)


@pytest.mark.parametrize(
    ("file", "part"),
    [("tokenizer.json", "tokenizer"), ("chat_template.jinja", "chat template"), ("config.json", "config")],
)
def test_changed_tokenizer_template_or_config_is_rejected(known_model_run, file, part):
    with (Path("policy") / file).open("a") as text:
        text.write(" ")
    with pytest.raises(CheckpointError, match=f"policy' is not the initial model of the run: {part} changed; restore"):
        resume(known_model_run)


def test_run_without_model_digests_can_be_resumed(run_dir):
    other_weights()
    assert not resume(run_dir).losses


def test_resume_removes_records_of_steps_to_repeat(run_dir):
    resume(run_dir)
    assert [record["step"] for record in read_jsonl(run_dir.metrics)] == [0, 1, 2, 3]
    assert [record["step"] for record in read_jsonl(run_dir.rollouts)] == [0, 1, 1, 2, 2, 3, 3]
    run_dir.write_rollout({"step": 4})
    assert [record["step"] for record in read_jsonl(run_dir.rollouts)][-2:] == [3, 4]


def test_lost_lines_of_metrics_and_transcripts_are_reported_once_each(run_dir):
    assert [loss for loss in resume(run_dir).losses if "jsonl" in loss] == []
    run_dir.close()
    kept = [line for line in run_dir.metrics.read_bytes().splitlines(keepends=True) if b'"step": 2' not in line]
    run_dir.metrics.write_bytes(b"".join(kept) + b"{cut sho\n" + b"\xff\n")
    run_dir.rollouts.write_bytes(b"".join(run_dir.rollouts.read_bytes().splitlines(keepends=True)[:2]) + b"[" * 1200)
    losses = [loss for loss in resume(run_dir).losses if "jsonl" in loss]
    assert losses == [
        f"{run_dir.metrics}: 2 lines that cannot be read are left out",
        f"{run_dir.metrics} has no lines of steps 2: they are lost",
        f"{run_dir.rollouts}: 1 line that cannot be read is left out",
        f"{run_dir.rollouts} has no lines of steps 2-3: they are lost",
    ]
    assert [record["step"] for record in read_jsonl(run_dir.metrics)] == [0, 1, 3]


def test_dropped_group_is_in_the_transcripts_once(run_dir):
    """A dropped group is generated again unless the checkpoint or the journal records the drop."""
    for path in (run_dir.rollouts, run_dir.metrics):
        path.unlink()

    def write_dropped(index: int, step: int) -> None:
        run_dir.write_rollout({"step": step, "phase": "train", "group_id": f"train-{index}", "dropped": "too_old"})

    write_dropped(10, step=3)
    write_dropped(9, step=4)  # while step 3 was trained
    write_dropped(11, step=4)  # after the checkpoint, according to the journal
    write_dropped(12, step=4)  # not in the journal
    run_dir.write_rollout({"step": 4, "phase": "validation", "group_id": "validation-1", "dropped": "reward_failed"})
    run_dir.write_rollout({"step": 4, "phase": "train", "group_id": "train-13"})
    run_dir.close()
    journal = RunJournal(run_dir.journal, DataPosition(3, 12, (11,)))
    journal.dropped(11, "too_old")
    journal.close()
    resume(run_dir)
    assert [record["group_id"] for record in read_jsonl(run_dir.rollouts)] == ["train-10", "train-9", "train-11"]


def test_run_without_a_checkpoint_starts_over_with_empty_files(run_dir):
    for step in (1, 3):
        folder = step_directory(run_dir.checkpoints, step)
        shutil.rmtree(folder)
    start = resume(run_dir)
    assert (start.checkpoint, start.state.step, start.state.next_index) == (None, 0, 0)
    assert start.losses == (f"{run_dir.path} has no checkpoint and no journal: the run starts from the beginning",)
    assert read_jsonl(run_dir.metrics) == read_jsonl(run_dir.rollouts) == []


class Stepped(msgspec.Struct):
    step: int


def test_cut_records_removes_invalid_lines_and_keeps_others_unchanged(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    kept = b'{"step": 1,  "text": "\\ud83d"}\n{"step": 1, "text": NaN}\n'
    path.write_bytes(kept + b'\xff\n[1]\n{"phase": "train"}\n{"step": 2}\n' + kept + b'{"step": 1, "torn')
    cut_records(path, Stepped, lambda record: record.step <= 1)
    assert path.read_bytes() == kept * 2
    cut_records(tmp_path / "none.jsonl", Stepped, lambda record: True)
    assert sorted(os.listdir(tmp_path)) == ["rollouts.jsonl"]


def test_settings_given_on_resume_are_saved_in_the_config(run_dir):
    resume(run_dir, ("training.steps", "9"), ("logging.sinks", '["wandb"]'))
    again = load_config(run_dir.config)
    assert (again.training.steps, again.logging.sinks) == (9, ("wandb",))
    assert resume(run_dir).state.step == 3


def test_run_stopped_after_its_last_step_can_be_finished(run_dir):
    assert resume(run_dir, ("training.steps", "3")).state.step == 3
    run_dir.export.mkdir()  # created last by a run
    with pytest.raises(CheckpointError, match="has trained all its 3 steps"):
        resume(run_dir, ("training.steps", "3"))


def test_run_whose_export_is_older_than_its_newest_checkpoint_is_not_finished(run_dir):
    run_dir.export.mkdir()
    newest = step_directory(run_dir.checkpoints, 3)
    os.utime(run_dir.export, (newest.stat().st_mtime - 1,) * 2)
    assert resume(run_dir, ("training.steps", "3")).state.step == 3


def test_decaying_schedule_does_not_jump_when_a_run_gets_more_steps(run_dir):
    decaying = [("training.lr_decay", "linear"), ("training.steps", "3")]
    config = load_config(run_dir.config, decaying)
    for folder in list_checkpoints(run_dir.checkpoints):
        save(folder, json.dumps(asdict(replace(RunState.read(folder), settings=settings_of(config)))))
    run_dir.write_config(config)
    run_dir.export.mkdir()
    with pytest.raises(CheckpointError, match=r"give it more with --training.steps 6 --training.decay_steps 3 \("):
        resume(run_dir)
    with pytest.raises(ConfigError, match=r"training.steps = 6, and the learning rate decays over 3 steps .*'linear'"):
        resume(run_dir, ("training.steps", "6"))
    resume(run_dir, ("training.steps", "6"), ("training.decay_steps", "3"))
    resume(run_dir, ("training.steps", "9"))  # config.toml has kept the length of the schedule
    resume(run_dir, ("training.steps", "9"), ("training.decay_steps", "9"))


def test_end_messages_name_the_saved_step_and_resume_command(run_dir):
    config = load_config(run_dir.config, [("training.steps", "3")])
    command = f"titan-rl train --resume {run_dir.path}"
    messages = EndMessages(config, run_dir, step=3)
    assert messages.stopped() == f"stopped with step 3 saved; to continue: {command}"
    assert messages.failed() == f"step 3 is saved; fix the error, then continue with: {command}"
    assert messages.cut_short() == f"checkpoints that were saved are kept; to continue: {command}"
    run_dir.export.mkdir()
    for finished in (messages.stopped(), messages.failed()):
        assert "continue" not in finished
        assert f"the run is finished, its policy is {run_dir.export}" in finished


def test_end_messages_after_a_failed_save_name_both_steps(run_dir):
    command = f"titan-rl train --resume {run_dir.path}"
    messages = EndMessages(load_config(run_dir.config), run_dir, step=1)
    messages.note_step(4)
    newest = step_directory(run_dir.checkpoints, 3)
    unsaved = "step 4, which is not saved"
    assert messages.stopped() == f"stopped at {unsaved}; to continue from step 3, {newest}: {command}"
    assert messages.failed().startswith(
        f"the run ended at {unsaved}; fix the error, then continue from step 3, {newest} with"
    )
    for step in (1, 3):
        shutil.rmtree(step_directory(run_dir.checkpoints, step))
    assert messages.stopped().startswith("stopped at step 4, which is not saved; to continue from step 0")
    messages.note_step(0)
    assert messages.stopped() == f"stopped before a step was trained; to continue: {command}"


def test_failed_run_without_saved_work_is_to_be_started_again(run_dir):
    config = load_config(run_dir.config)
    for step in (1, 3):
        shutil.rmtree(step_directory(run_dir.checkpoints, step))
    start_command, resume_command = "titan-rl train my.toml", f"titan-rl train --resume {run_dir.path}"
    messages = EndMessages(config, run_dir, step=0, started_by=start_command)
    journal = RunJournal(run_dir.journal)
    journal.dropped(0, "errors")
    journal.drain()
    assert messages.failed() == f"nothing was trained or saved; fix the error, then run: {start_command}"
    assert EndMessages(config, run_dir, step=0).failed().endswith(resume_command)
    journal.finished(Assigned(1, "task", 1), RolloutGroup("train-1", None, []))
    journal.close()
    assert messages.failed() == f"fix the error, then continue with: {resume_command}"


def test_run_without_a_checkpoint_resumes_from_its_journal(run_dir):
    for step in (1, 3):
        shutil.rmtree(step_directory(run_dir.checkpoints, step))
    RunJournal(run_dir.journal).close()
    assert resume(run_dir).losses == ()


def test_rejected_resume_changes_no_file(run_dir):
    run_dir.export.mkdir()
    before = {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()}
    for overrides in ([("training.steps", "3")], [("training.steps", "9"), ("training.lr", "2")]):
        with pytest.raises((CheckpointError, ConfigError)):
            resume(run_dir, *overrides)
    assert {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()} == before


def test_journal_without_its_checkpoints_is_rejected_and_files_are_kept(run_dir):
    journal = RunJournal(run_dir.journal, DataPosition(3, 12, (11,)))
    journal.close()
    for step in (1, 3):
        shutil.rmtree(step_directory(run_dir.checkpoints, step))
    before = {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="restore it"):
        resume(run_dir, ("training.steps", "9"))
    assert {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()} == before


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("place", "make"),
    [
        *[("journal", make) for make in (Path.touch, os.mkfifo, loop)],
        *[("journal/step-000003.journal", make) for make in (Path.mkdir, os.mkfifo, loop)],
    ],
)
def test_invalid_journal_path_is_rejected_before_any_change(run_dir, place, make):
    path = run_dir.path / place
    path.parent.mkdir(exist_ok=True)
    make(path)
    before = {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=rf"{place}.* cannot be read: .* to continue from the checkpoint alone"):
        resume(run_dir, ("training.steps", "9"))
    assert {path: path.read_bytes() for path in run_dir.path.rglob("*") if path.is_file()} == before


def test_edited_config_is_compared_with_the_checkpoint_settings(run_dir):
    edit(run_dir, "groups_per_step = 16", "groups_per_step = 12")
    edit(run_dir, "seed = 7", "seed = 8")
    with pytest.raises(ConfigError) as refused:
        resume(run_dir)
    message = str(refused.value)
    changes = ["seed is 8, {} 7", "scheduling.groups_per_step is 12, {} 16"]
    *lines, fix = message.splitlines()
    assert fix == f"titan-rl train --from {run_dir.path} begins a new run from the weights of this one"
    for line, change in zip(lines, changes, strict=True):
        difference = change.format("and this run was made with")
        assert line == f"{run_dir.config}: {difference}; restore that value, or begin a new run with the current one"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("scheduling.window", "3"), ("task.length", "4"), ("task.words", '["ham"]'), ("training.betas", "[0.9, 0.99]")],
)
def test_settings_that_affect_rollouts_or_weights_cannot_change(run_dir, setting, value):
    with pytest.raises(ConfigError, match=f"{setting} is"):
        resume(run_dir, (setting, value))


def test_settings_that_do_not_affect_results_can_change(run_dir):
    for setting, value in [
        ("run_dir", "elsewhere"),
        ("generation.num_generators", "3"),
        ("training.steps", "50"),
        ("checkpoint.keep", "7"),
        ("scheduling.max_refills", "9"),
        ("rollout.env_timeout_s", "120"),
    ]:
        resume(run_dir, (setting, value))
    state = RunState.read(step_directory(run_dir.checkpoints, 3))
    made_with = json.loads(json.dumps(dict(state.settings))) | {"scheduling.of_another_version": 1}
    del made_with["seed"]
    save(step_directory(run_dir.checkpoints, 3), json.dumps(asdict(RunState(3, 100, 0.5, 12, (11,), made_with))))
    assert resume(run_dir).state.step == 3


@pytest.mark.parametrize("content", ["", "[]", '{"step": 3, "tokens": 1, "reward_before": 0.5}'])
def test_checkpoint_without_a_data_position_is_rejected(run_dir, content):
    save(step_directory(run_dir.checkpoints, 3), content)
    with pytest.raises(CheckpointError, match="has no valid state of the run"):
        resume(run_dir)


def test_checkpoint_with_an_incompatible_task_mix_is_rejected(run_dir):
    newest = step_directory(run_dir.checkpoints, 3)
    settings = RunState.read(newest).settings
    save(newest, json.dumps(asdict(RunState(3, 100, 0.5, 12, (11,), settings, tasks={"taken": {"sums": 3}}))))
    before = run_dir.metrics.read_text()
    with pytest.raises(CheckpointError, match=rf"{newest}: .*lacks 'curricula', .*continue with that version"):
        resume(run_dir)
    assert run_dir.metrics.read_text() == before


def spoil(checkpoint: Path) -> Path:
    path = checkpoint / "run_state.json"
    path.write_text(path.read_text().replace("0.5", "0.6"))
    return path


def test_damaged_checkpoint_is_reported_and_the_previous_one_used(run_dir):
    newest = step_directory(run_dir.checkpoints, 3)
    spoiled = spoil(newest)
    start = resume(run_dir)
    assert start.checkpoint == step_directory(run_dir.checkpoints, 1)
    assert (start.state.step, start.state.reward_before) == (1, 0.5)
    (loss,) = start.losses
    assert f"{spoiled} is damaged: its checksum is" in loss
    assert str(newest.with_name("step-000003.damaged")) in loss
    assert list_checkpoints(run_dir.checkpoints) == [start.checkpoint]
    assert [record["step"] for record in read_jsonl(run_dir.metrics)] == [0, 1]
    assert resume(run_dir).losses == ()


def test_checkpoint_named_for_another_step_is_damaged(run_dir):
    renamed = step_directory(run_dir.checkpoints, 7)
    step_directory(run_dir.checkpoints, 3).rename(renamed)
    start = resume(run_dir)
    assert (start.checkpoint, start.state.step) == (step_directory(run_dir.checkpoints, 1), 1)
    (loss,) = start.losses
    assert f"{renamed} is damaged: it holds step 3" in loss


def test_run_with_only_damaged_checkpoints_is_rejected(run_dir):
    for step in (1, 3):
        spoil(step_directory(run_dir.checkpoints, step))
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint in .* is whole: .*step-000003.*step-000001"):
        resume(run_dir)
    assert len(list_checkpoints(run_dir.checkpoints)) == 2
