"""Commands on the folder of a run of several adapters, or of one of its adapters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from peft_files import BASE

import titan_rl
from titan_rl.cli.eval import split
from titan_rl.cli.main import main
from titan_rl.config.load import dump_config, load_config
from titan_rl.core.console import LOG
from titan_rl.core.errors import TrainingError
from titan_rl.evaluation.policies.policy_source import find_policy
from titan_rl.run import train
from titan_rl.run.directory import RunDirectory
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.sinks import Sinks
from titan_rl.run.observability.summary import RunSummary
from titan_rl.run.resumption import begin_run
from titan_rl.run.several_adapters import Experiment, ExperimentMessages, Experiments

SEVERAL = "examples/alphabet_sort/several.toml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose adapter "grpo" has begun."""
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    run = tmp_path / "run"
    for folder, settings in ((run, config), (run / "adapters" / "grpo", config.experiments["grpo"])):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.toml").write_text(dump_config(settings))
    return run


@pytest.mark.parametrize(
    "command",
    [
        ["eval", "RUN"],
        ["eval", SEVERAL, "RUN"],
        ["play", SEVERAL, "--policy", "RUN"],
        ["export", "RUN", "OUT"],
        ["export", "RUN", "OUT", "--adapter"],
    ],
)
def test_run_of_several_adapters_is_not_a_policy(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"RUN": str(run), "OUT": str(run / "out")}
    assert main([paths.get(word, word) for word in command]) == 2
    output = capsys.readouterr().err
    assert f"{run} is a run of several adapters, each of which is a policy; name one of them: " in output
    assert f"{run}/adapters/grpo, {run}/adapters/gspo, {run}/adapters/rank_8" in output


def test_quiet_train_prints_the_results_of_all_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results = {name: RunSummary(0.1, 0.4, 80, 900, 5.0, tmp_path / "adapters" / name) for name in ("grpo", "gspo")}
    summary = RunSummary.of_adapters(results, tmp_path, 7.0)
    monkeypatch.setattr(train, "run_training", lambda *args, **options: train.RunEnd(0, tmp_path, summary))
    assert main(["train", SEVERAL, "-q", "--model.path", str(BASE)]) == 0
    printed = capfd.readouterr().out
    for name in results:
        assert f"adapter {name}  80 steps; validation reward 0.100 before, 0.400 after (+0.300)\n" in printed
    given = titan_rl.train(SEVERAL, overrides={"model.path": str(BASE)})
    assert given.adapters["gspo"].reward_after == 0.4


def test_serve_requires_one_adapter_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "adapters" / "grpo" / "checkpoints" / "step-000003").mkdir()
    assert main(["serve", str(run), "--follow", "--dry-run"]) == 2
    output = capsys.readouterr().err
    assert f"--follow: {run} is a run with [[adapters]], which are served together as they are; name one" in output
    assert f"one of them ({run}/adapters/grpo, {run}/adapters/gspo, {run}/adapters/rank_8), or leave" in output
    assert main(["serve", str(BASE), "--dry-run", f'--server.adapters={{ mine = "{run}" }}']) == 2
    assert f"server.adapters.mine = {str(run)!r}: {run} is a run of several adapters" in capsys.readouterr().err


def test_run_of_one_adapter_is_the_policy_of_that_adapter(tmp_path: Path) -> None:
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    config = config.model_copy(update={"adapters": config.adapters[:1]})
    run, only = tmp_path / "run", tmp_path / "run" / "adapters" / "grpo"
    for folder, settings in ((run, config), (only, config.experiments["grpo"])):
        (folder / "checkpoints" / "step-000003").mkdir(parents=True)
        (folder / "config.toml").write_text(dump_config(settings))
    found = find_policy(str(run))
    assert found == find_policy(str(only))
    assert (found.version, found.toml) == (3, only / "config.toml")
    assert split([str(run)]) == ([str(only / "config.toml")], [str(run)])


def test_adapter_cannot_be_resumed_without_its_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", str(run / "adapters" / "grpo"), "--training.steps", "99"]) == 2
    output = capsys.readouterr().err
    assert f"continue together: titan-rl train --resume {run}; for more steps" in output
    assert "--adapters.grpo.training.steps N" in output


@dataclass
class Loop:
    """Training loop of an adapter, at a version."""

    version: int


def test_failed_adapter_message_names_its_step_and_the_saved_step(run: Path) -> None:
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    experiment = Experiment("grpo", config.experiments["grpo"], run)
    messages = ExperimentMessages(config, RunDirectory(run), 0)
    messages.experiments = [experiment]
    experiment.error, experiment.controller = TrainingError("the disk is gone"), cast(Any, Loop(3))
    unsaved = "step 3 is not saved: there is no checkpoint"
    assert experiment.failed() == f"failed at step 3 ({unsaved}), and the others continue: the disk is gone"
    assert messages.failed().startswith(f"grpo: {unsaved}; fix the error")
    (run / "adapters" / "grpo" / "checkpoints" / "step-000002").mkdir()
    assert "(step 3 is not saved: the newest checkpoint is of step 2)" in experiment.failed()
    assert messages.stopped().startswith("stopped; grpo: step 3 is not saved: the newest checkpoint is of step 2; to")
    (run / "adapters" / "grpo" / "checkpoints" / "step-000003").mkdir()
    assert experiment.failed() == "failed at step 3, and the others continue: the disk is gone"
    assert messages.stopped().startswith("stopped; the trained steps of all adapters are saved; to continue")


async def test_adapters_failed_error_has_the_summaries_of_the_others(run: Path) -> None:
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    experiments = [Experiment(name, config.experiments[name], run) for name in ("grpo", "gspo")]
    finished, damaged = experiments
    finished.summary = RunSummary(0.1, 0.4, 80, 900, 5.0, run / "adapters" / "grpo")
    (damaged.run_dir.path / "config.toml").mkdir()  # it cannot be written
    remote = SimpleNamespace(reason=None)
    training = SimpleNamespace(trainer=SimpleNamespace(remote=remote))
    session = SimpleNamespace(run_dir=RunDirectory(run), progress=Progress(2), config=config, sinks=Sinks({}, LOG))
    planes = SimpleNamespace(training=training, routers=None)
    with pytest.raises(titan_rl.AdaptersFailedError, match="1 of 2 adapters failed: gspo: ") as caught:
        await Experiments(*cast(Any, (session, experiments, planes, None))).run()
    assert caught.value.finished == {"grpo": finished.summary}
    assert list(caught.value.failed) == ["gspo"]


class Gone:
    """Routers of adapters that raise a cancellation, as a closed client does."""

    @property
    def by_adapter(self) -> None:
        raise asyncio.CancelledError


async def test_stray_cancellation_fails_the_adapter(run: Path) -> None:
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    training = SimpleNamespace(trainer=SimpleNamespace(remote=SimpleNamespace(reason=None)))
    session = SimpleNamespace(run_dir=RunDirectory(run), progress=Progress(2), config=config, sinks=Sinks({}, LOG))
    planes = SimpleNamespace(training=training, router=Gone())
    experiments = [Experiment("gspo", config.experiments["gspo"], run)]
    with pytest.raises(titan_rl.AdaptersFailedError, match="adapter gspo was cancelled, although nobody requested it"):
        await Experiments(*cast(Any, (session, experiments, planes, None))).run()


def test_resume_requires_an_adapter_with_steps_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    begin_run(config, RunDirectory(run))
    for name, experiment in config.experiments.items():
        folder = RunDirectory(run / "adapters" / name)
        folder.write_config(experiment)
        state = begin_run(experiment, folder).state
        checkpoint = folder.checkpoints / f"step-{experiment.training.steps:06}"
        checkpoint.mkdir()
        replace(state, step=experiment.training.steps).write(checkpoint)
        folder.export.mkdir()
    for more in ([], ["--dry-run"]):
        assert main(["train", "--resume", str(run), *more]) == 1
        output = capsys.readouterr().err
        assert f"{run}: all adapters have trained all their steps; give one of them more, for example with " in output
        assert "--adapters.grpo.training.steps 160" in output
    damaged = run / "adapters" / "rank_8" / "checkpoints" / "step-000040"
    assert main(["train", "--resume", str(run), "--dry-run", "--adapters.rank_8.training.steps", "41"]) == 1
    assert f"{damaged} has no checksums.json" in capsys.readouterr().err


class BrokenPlanes:
    """Planes whose trainer is gone, and whose routers cannot be closed."""

    trainer = SimpleNamespace(remote=SimpleNamespace(reason=None))

    def __init__(self) -> None:
        self.training = self.router = self
        self.by_adapter = self.published = {"gspo": None}

    @property
    def adapters(self) -> None:
        raise TrainingError("the trainer is gone")

    async def close_router(self, name: str) -> None:
        raise OSError(f"the router of {name} does not close")


async def test_adapter_error_is_not_hidden_by_an_error_while_closing(run: Path) -> None:
    config = load_config(SEVERAL, [("model.path", str(BASE))])
    session = SimpleNamespace(run_dir=RunDirectory(run), progress=Progress(2), config=config, sinks=Sinks({}, LOG))
    experiment = Experiment("gspo", config.experiments["gspo"], run)
    with pytest.raises(titan_rl.AdaptersFailedError, match="gspo: the trainer is gone"):
        await Experiments(*cast(Any, (session, [experiment], BrokenPlanes(), None))).run()
    assert experiment.error is not None
    assert experiment.error.__notes__ == ["cleaning up failed, too: OSError: the router of gspo does not close"]
