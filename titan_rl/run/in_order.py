"""What every run has around it, whatever it does: a folder of its own, where it begins, and an end in order."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any
from uuid import uuid4

from titan_rl.cluster.hosts.folders import scratch_root
from titan_rl.config.changes import settings_of
from titan_rl.config.concurrency import throttles
from titan_rl.config.model_files import model_identity
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.cancellation import FirstError
from titan_rl.core.calls.user_code import describe
from titan_rl.core.errors import ConfigError, TrainingError
from titan_rl.run.checkpoints.resumption import Resumption, Standing, find_standing, resume_from_newest
from titan_rl.run.directory import RunDirectory, check_files
from titan_rl.run.end_messages import EndMessages
from titan_rl.run.journal.state import RunState
from titan_rl.run.machine.environment import logging_to, run_environment
from titan_rl.run.machine.guard import guarded
from titan_rl.run.machine.requirements import check_room, size_of
from titan_rl.run.machine.signals import STOPPING_EARLY, StopSignals, run_to_its_end, run_until_signal, tell_on_stderr
from titan_rl.run.status import noted, reported

logger = logging.getLogger(__name__)


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
    check_files(resume)
    check_room(config, resume, held=size_of(resume / "checkpoints"))
    run_dir = RunDirectory(resume)
    if run_dir.supervised.is_file() != supervised:
        command = "train" if supervised else "sft"
        raise ConfigError(f"--resume {resume}: that is a run of titan-rl {command}; titan-rl {command} goes on with it")
    return run_dir


def check_resumption(config: RunConfig, resume: Path, *, supervised: bool = False) -> Standing:
    """Find out whether a run could go on, and from where, and leave it as it is.

    Args:
        config: with which it would.
        supervised: as of `open_run_dir`.

    Raises:
        ConfigError, CheckpointError: it could not.
    """
    run_dir = open_run_dir(config, resume, supervised=supervised)
    with run_dir.locked():
        return find_standing(config, run_dir)


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
    first = FirstError()
    with first.wins(), run_dir.locked(), logging_to(run_dir.logs / "controller.log"):
        if begins:
            model = model_identity(Path(config.model.path))
            start = Resumption(None, RunState(settings=settings_of(config), run=uuid4().hex, model=model))
            start.state.write(run_dir.path)
        else:
            start = resume_from_newest(config, run_dir)
            run_dir.become_latest()
        for warning in throttles(config):
            logger.warning("%s", warning)
        messages = EndMessages(config, run_dir, start.state.step, begun_by if begins else None, command)
        with (
            reported(run_dir.path, run_dir.report),
            noted(run_dir.path, begins=begins) as outcome,
            _machine(config, run_dir, messages, starts_processes=starts_processes) as signals,
            first.source(),
        ):
            try:
                run = program(config, run_dir, start, signals, messages)
                code = outcome.code = run_to_its_end(run_until_signal(run, signals, messages.failed))
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
