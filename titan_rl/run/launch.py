"""The story of a run, from a checked config to its end.

run_training   what the run needs is installed, and its folder is there
run_in_order   the folder is this process's; where the run begins is found; signals, guard and environment are set
_run           outputs are open, processes are started and wired, the controller trains; all of it is given back
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from titan_rl.actors.processes.garbage import settled_heap
from titan_rl.calls.user_code import describe
from titan_rl.calls.watchdog import LoopWatchdog
from titan_rl.config.changes import settings_of
from titan_rl.config.concurrency import throttles
from titan_rl.config.make_renderer import make_renderer
from titan_rl.config.make_rollouter import open_rollouters
from titan_rl.config.run import RunConfig
from titan_rl.errors import ConfigError, TrainingError
from titan_rl.rollout.group.runner import GroupRunner
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.checkpoints.resumption import Resumption, resume_from_newest
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory
from titan_rl.run.end_messages import EndMessages
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.run.machine.disk_space import check_room, size_of
from titan_rl.run.machine.environment import file_modes, run_environment, scratch_root
from titan_rl.run.machine.event_loop import run_to_its_end
from titan_rl.run.machine.guard import guarded
from titan_rl.run.machine.log_file import logging_to
from titan_rl.run.machine.stop_signals import StopSignals, tell_on_stderr
from titan_rl.run.observability.outputs import open_outputs
from titan_rl.run.observability.progress import RunSummary
from titan_rl.run.observability.standstill import Standstill
from titan_rl.run.parts import Parts, Planes, describe_processes, open_planes
from titan_rl.run.stopping import STOPPING, STOPPING_EARLY, run_until_signal
from titan_rl.weights.shard_files.shard_folder import clean_dead_shards

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunEnd:
    """How a run ended in order.

    Attributes:
        code: 0, or 128 + the number of the signal that stopped it.
        summary: None where it was stopped.
    """

    code: int
    run_dir: Path
    summary: RunSummary | None = None


def run_training(
    config: RunConfig,
    resume: Path | None = None,
    *,
    parts: Parts | None = None,
    name: str | None = None,
    begun_by: str | None = None,
) -> RunEnd:
    """Run a config to its end.

    Args:
        resume: the folder of an earlier run with this config, which is continued from its newest checkpoint.
        parts: in the place of what the settings name.
        name: of the folder of a run that begins; by default as of `run_name`.
        begun_by: the command to name where the run fails before there is anything to go on from.

    Raises:
        TitanRLError: what ended the run.
    """
    parts = parts or Parts()
    parts.check(config)
    with file_modes(share=config.share_run_dir):
        run_dir = open_run_dir(config, resume, name)
        end = RunEnd(0, run_dir.path)

        async def program(*given: Any) -> None:
            end.summary = await _run(parts, *given)

        end.code = run_in_order(
            program,
            run_dir,
            config,
            begins=resume is None,
            begun_by=begun_by,
            starts_processes=parts.needs_processes,
        )
        return end


def open_run_dir(
    config: RunConfig, resume: Path | None, name: str | None = None, *, supervised: bool = False
) -> RunDirectory:
    """The folder of the run that is resumed, or one that is made.

    Args:
        supervised: the run is one of `titan-rl sft`.

    Raises:
        ConfigError: it cannot be made or written to, it is of a run of the other kind, or the disk has not enough room
            for the run.
    """
    if resume is None:
        check_room(config, Path(config.run_dir))
        return RunDirectory.create(config, name)
    if not os.access(resume, os.W_OK | os.X_OK):
        raise ConfigError(f"--resume {resume}: the run cannot go on in a folder that you may not write to; copy it")
    check_room(config, resume, held=size_of(resume / "checkpoints"))
    run_dir = RunDirectory(resume)
    if run_dir.supervised.is_file() != supervised:
        command = "train" if supervised else "sft"
        raise ConfigError(f"--resume {resume}: that is a run of titan-rl {command}; titan-rl {command} goes on with it")
    return run_dir


Program = Callable[[RunConfig, RunDirectory, Resumption, StopSignals, EndMessages], Coroutine[Any, Any, None]]
"""What a run does between its beginning and its end."""


def run_in_order(
    program: Program,
    run_dir: RunDirectory,
    config: RunConfig,
    *,
    begins: bool,
    begun_by: str | None,
    command: str = "train",
    starts_processes: bool = True,
) -> int:
    """Run a program from where its run stands, so that it can be stopped at any time.

    Args:
        begins: the run is not resumed.
        command: of `titan-rl`, that goes on with the run.
        starts_processes: whether the machine is to be ready for them.

    Returns:
        exit code: 0, or 128 + the number of the signal that ended the run in order.

    Raises:
        TitanRLError: what ended the run.
    """
    with run_dir.locked(), logging_to(run_dir.logs / "controller.log"):
        if begins:
            start = Resumption(None, RunState(settings=settings_of(config), run=uuid4().hex))
            start.state.write(run_dir.path)
        else:
            start = resume_from_newest(config, run_dir)
            run_dir.become_latest()
        for warning in throttles(config):
            logger.warning("%s", warning)
        messages = EndMessages(config, run_dir, start.state.step, begun_by if begins else None, command)
        with _machine(config, run_dir, messages, starts_processes=starts_processes) as signals:
            try:
                run = program(config, run_dir, start, signals, messages)
                code = run_to_its_end(run_until_signal(run, signals, messages.failed))
            except (SystemExit, KeyboardInterrupt) as error:  # of what user code has begun: no signal raises here
                failure = TrainingError(f"an environment, a reward or the task exits Python: {describe(error)}")
                failure.add_note(messages.failed())
                raise failure from None
        if code:
            tell_on_stderr(messages.stopped())
        return code


@contextlib.contextmanager
def _machine(
    config: RunConfig, run_dir: RunDirectory, messages: EndMessages, *, starts_processes: bool
) -> Generator[StopSignals]:
    """Signals, which only the main thread hears of, and what processes need."""
    signals = StopSignals(STOPPING_EARLY, f"ended at once; {messages.cut_short()}")
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as resources:
        if is_main:
            resources.enter_context(signals)
        if is_main and starts_processes:
            resources.enter_context(guarded(scratch_root(), run_dir.run_id, messages.cut_short()))
        if starts_processes:
            resources.enter_context(run_environment(config.pythonpath))
        yield signals


async def _run(
    parts: Parts,
    config: RunConfig,
    run_dir: RunDirectory,
    start: Resumption,
    signals: StopSignals,
    messages: EndMessages,
) -> RunSummary:
    if parts.needs_processes:
        importlib.import_module("titan_rl.actors.run_processes")  # takes seconds
    await asyncio.sleep(0)  # a signal that came until now stops the run here, before it says or starts anything
    renderer = parts.renderer or make_renderer(config.model)
    with open_outputs(config, run_dir, parts.sinks) as (progress, sinks), contextlib.ExitStack() as resources:
        signals.tell = progress.end_with
        resources.callback(clean_dead_shards)  # of a trainer that was killed
        progress.message(f"run directory: {run_dir.path}")
        if described := describe_processes(config, parts):
            progress.message(f"starting {described}")
        journal = resources.enter_context(_journal(run_dir, start, progress.message))
        resources.enter_context(LoopWatchdog(progress.message))
        async with (
            open_planes(config, parts, run_dir, progress.message) as planes,
            _group_runners(config, run_dir, planes, progress.message, renderer) as group_runners,
        ):
            resources.enter_context(settled_heap())
            if start.checkpoint is not None:
                start.loaded(await planes.trainer.load(start.checkpoint))
                progress.message(f"continuing from {start.checkpoint}")
            controller = Controller(
                config,
                group_runners=group_runners,
                router=planes.router,
                trainer=planes.trainer,
                stop_token_ids=renderer.get_stop_token_ids(),
                published=parts.published,
                run_dir=run_dir,
                log=sinks.log,
                progress=progress,
                journal=journal,
                start=start.state,
                filters=parts.filters,
            )
            resources.callback(controller.close)
            resources.callback(lambda: messages.stands_at(controller.version))
            standstill = Standstill(controller.progress, controller.waits_for, progress.message)
            async with _beside(watch=planes.watch(), standstill=standstill.watch()):
                signals.stopping = STOPPING
                summary = await controller.run()
    progress.summary(summary)
    return summary


@contextlib.asynccontextmanager
async def _group_runners(
    config: RunConfig, run_dir: RunDirectory, planes: Planes, tell: Callable[[str], object], renderer: Renderer
) -> AsyncGenerator[Mapping[str, GroupRunner]]:
    """By the tasks' names: rollout workers, each of which opens the tasks for itself; or rollouters in this process."""
    if planes.workers is not None:
        yield {source.name: planes.workers.of(source.name) for source in config.sources}
        return
    async with open_rollouters(config, run_dir.path, tell, renderer) as rollouters:
        yield rollouters


@contextlib.contextmanager
def _journal(run_dir: RunDirectory, start: Resumption, tell: Callable[[str], None]) -> Generator[RunJournal]:
    """The run's journal, with what is to be known of what it lost or has again."""
    journal = RunJournal(run_dir.journal, start.state.position, start.journal)
    with contextlib.closing(journal):
        for loss in (*start.losses, *journal.losses):
            tell(loss)
        if journal.num_batches_again:
            tell(f"{journal.num_batches_again} steps after the checkpoint are trained again, on what they had")
        yield journal


@contextlib.asynccontextmanager
async def _beside(**coroutines: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """Tasks for the length of the block, by name. One that fails ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
        yield
        for task in running:
            task.cancel()
