"""Supervised run, from a checked config to the model that it makes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from titan_rl.cluster.hosts.elastic import hosts_watcher
from titan_rl.cluster.hosts.lifecycle import HostHistory
from titan_rl.cluster.hosts.requests import HostFiles
from titan_rl.config.build import make_renderer, told_of_template
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.parsing import parse_json
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.errors import CheckpointError
from titan_rl.run.directory import RunDirectory, run_name
from titan_rl.run.machine.environment import file_modes
from titan_rl.run.machine.requirements import require_modules
from titan_rl.run.observability.progress import Verbosity, status
from titan_rl.run.observability.summary import show_summary
from titan_rl.run.observability.watchers import warn_of_shortage
from titan_rl.run.session import RunSession, check_resumption, open_run_dir
from titan_rl.run.sft.demonstrations import Found, TokenSource
from titan_rl.run.sft.loop import LearnedSteps, SupervisedLoop, SupervisedSummary
from titan_rl.run.sft.plan import digest, find_demonstrations, make_start, plan_steps, supervised
from titan_rl.run.trainer_recovery import lacks_of, open_trainer
from titan_rl.weights.types import PublishedWeights

if TYPE_CHECKING:
    from titan_rl.cluster.trainer_processes import TrainerProcesses


def run_sft(
    config: RunConfig,
    resume: Path | None = None,
    *,
    name: str | None = None,
    begun_by: str | None = None,
    verbosity: Verbosity = Verbosity.NORMAL,
) -> int:
    """Train a model on demonstrations, from beginning to end.

    Args:
        config: Result of `load_sft_config`.
        resume: Folder of an earlier run with this config, which is continued from its newest checkpoint.
        name: Name of a new run's folder.
        begun_by: Command to name if the run fails before it has saved anything.

    Returns:
        exit code: 0, or 128 + the number of the signal that ended the run in order.

    Raises:
        TitanRLError: The error that ended the run.
    """
    require_modules("torch", "monarch", "torchtitan", "transformers")
    with status("reading the demonstrations", verbosity):
        found = find_demonstrations(config)
    check_own_machine(config.hosts)
    with file_modes(share=config.share_run_dir):
        run_dir = open_run_dir(config, resume, name or f"sft-{run_name(config)}", supervised=True)
        with status("reading the model and the demonstrations", verbosity):
            ready = prepared(config, found, run_dir.path)
        _check_data(run_dir.supervised, digest(found))
        if resume is None:
            run_dir.write_config(ready)
        session = RunSession[SupervisedSummary](
            ready,
            run_dir,
            begins=resume is None,
            begun_by=begun_by,
            command="sft",
            processes="titan_rl.cluster.trainer_processes",
            verbosity=verbosity,
        )
        code = session.run(partial(_teach, session, found))
    if session.summary is not None:
        show_summary(session.summary)
    return code


def prepared(config: RunConfig, found: list[Found], folder: Path) -> RunConfig:
    """Settings of the run that makes the supervised steps, with the model that it starts from.

    Args:
        folder: Folder in which a tiny model is made if settings name none.

    Raises:
        ConfigError: settings do not fit the model.
        DataError: a demonstration cannot be rendered, or there are too few.
    """
    start = Path(config.sft.start or folder / "start")
    model = config.model.model_copy(update={"path": str(start)})
    if not config.sft.start:
        make_start(start, model, found, config)
    plan, _ = plan_steps(config, _token_source(model, found), len(found))
    return supervised(config, model, len(plan))


def check(config: RunConfig, folder: Path, resume: Path | None = None) -> tuple[RunConfig, str]:
    """Check a supervised run without starting it.

    Args:
        folder: Folder for temporary files.
        resume: Folder of an earlier run, which would be continued.

    Returns:
        settings of the run, with `sft.start` as given, and a description of the demonstrations.

    Raises:
        TitanRLError: the run would not begin.
    """
    found = find_demonstrations(config)
    ready = prepared(config, found, folder)
    losses: Sequence[str] = ()
    if resume is not None:
        losses = check_resumption(ready, resume, supervised=True).losses
        _check_data(RunDirectory(resume).supervised, digest(found))
    tokens = _token_source(ready.model, found)
    plan, held_out = plan_steps(ready, tokens, len(found))
    samples = tokens.samples(plan[0])
    lengths = [len(sample.token_ids) for sample in samples]
    learned = sum(sample.num_trained_tokens for sample in samples)
    told = "".join(f"{loss}\ntitan-rl: " for loss in losses) + (
        f"{len(found) - len(held_out):,} demonstrations to learn in {len(plan):,} steps, and {len(held_out)} held out; "
        f"the first step learns {learned:,} of {sum(lengths):,} tokens, {max(lengths)} in the longest conversation"
    )
    shown = ready.sft.model_copy(update={"start": config.sft.start})
    return ready.model_copy(update={"sft": shown, "model": config.model, "training": config.training}), told


def _token_source(model: Any, found: list[Found]) -> TokenSource:
    return TokenSource(make_renderer(model), found, model.max_context)


def _check_data(file: Path, now: str) -> None:
    """Check that a resumed run has the demonstrations that it began with, because its steps refer to them."""
    if not file.exists():
        file.write_text(json.dumps({"demonstrations": now}) + "\n", encoding="utf-8")
        return
    try:
        before = cast("dict[str, Any]", parse_json(file.read_text(encoding="utf-8")))["demonstrations"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{file} does not say which demonstrations the run learns: {error}; put it back"
        ) from None
    if before != now:
        raise CheckpointError(
            f"{file.parent} learned other demonstrations than there are now, or in another order; put them back, or "
            "begin a new run"
        )


async def _teach(
    session: RunSession[SupervisedSummary], found: list[Found], resources: contextlib.AsyncExitStack
) -> SupervisedSummary:
    from titan_rl.cluster.trainer_processes import start_trainer

    config, run_dir, progress = session.config, session.run_dir, session.progress
    if note := told_of_template(config.model):
        progress.message(note)
    for loss in session.start.losses:
        progress.warning(loss)
    with progress.working("turning the demonstrations into tokens"):
        tokens = _token_source(config.model, found)
        plan, held_out = plan_steps(config, tokens, len(found))
    progress.message(
        f"{len(found) - len(held_out):,} demonstrations to learn in {len(plan):,} steps, and {len(held_out)} held "
        "out; starting a trainer"
    )
    resources.enter_context(LoopWatchdog(progress))
    (files := HostFiles(run_dir.path)).begin()
    history = HostHistory()
    with progress.working("starting a trainer"):
        processes = await resources.enter_async_context(start_trainer(config, run_dir, progress))
    training = processes.training
    watch_hosts = hosts_watcher(config.hosts, files, processes, history, session.provided)
    steps, published = LearnedSteps(tokens, plan), PublishedWeights()  # nobody reads them
    opening = open_trainer(training, steps, config, run_dir, published, progress)
    trainer = await resources.enter_async_context(opening)
    await session.load(trainer)
    loop = SupervisedLoop(
        config,
        trainer,
        tokens,
        plan=plan,
        held_out=held_out,
        run_dir=run_dir,
        start=session.start.state,
        sinks=session.sinks,
        progress=progress,
        hosts=history,
    )
    training.before_leaving = loop.save_soon
    resources.callback(lambda: session.messages.stands_at(loop.version))
    shortage = warn_of_shortage(_TrainerAlone(training), progress, run_dir.path)
    async with session.training(hosts=watch_hosts(), shortage=shortage):
        summary = await loop.run()
    await training.close()
    return summary


@dataclass(frozen=True, slots=True)
class _TrainerAlone:
    """`Resources` of a run without generators."""

    training: TrainerProcesses

    def trouble(self) -> str | None:
        return None

    def trainer_lacks(self) -> str:
        return lacks_of(self.training)
