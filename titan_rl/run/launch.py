"""From a checked config to a finished run: environment, processes, signals, and giving everything back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

from titan_rl.actors.processes.garbage import settled_heap
from titan_rl.calls.event_loop import run_to_its_end
from titan_rl.calls.user_code import describe
from titan_rl.calls.watchdog import LoopWatchdog
from titan_rl.config.changes import settings_of
from titan_rl.config.concurrency import throttles
from titan_rl.config.make_rollouter import make_rollouter
from titan_rl.config.run import RunConfig
from titan_rl.errors import ConfigError, MissingExtraError, TitanRLError, TrainingError
from titan_rl.generation.router.affinity import ConsistentHash, GroupAffinity
from titan_rl.generation.router.limits import Limits
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.router.strategies import LeastLoaded, RoundRobin, StickySession, Strategy
from titan_rl.rollout.renderer import ChatTemplateRenderer
from titan_rl.run.checkpoints.resumption import Resumption, resume_from_newest
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory
from titan_rl.run.end_messages import EndMessages
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.run_state import RunState
from titan_rl.run.machine.disk_space import check_room, size_of
from titan_rl.run.machine.environment import file_modes, run_environment, scratch_root
from titan_rl.run.machine.guard import guarded
from titan_rl.run.machine.stop_signals import StopSignals, tell_on_stderr
from titan_rl.run.observability.best_effort import BestEffort
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.report import write_report
from titan_rl.run.observability.sinks import open_sinks
from titan_rl.run.observability.standstill import Standstill

logger = logging.getLogger(__name__)

STOPPING = (
    "stopping: a step that is being trained is finished, and what is trained is saved; once more ends the run at once, "
    "without saving"
)
STOPPING_EARLY = (
    "stopping: the run is still being set up, and has trained nothing that is not saved; once more ends it at once"
)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_training(config: RunConfig, resume: Path | None = None) -> int:
    """Run a config to its end.

    Args:
        resume: the folder of an earlier run with this config, which is continued from its newest checkpoint.

    Returns:
        exit code: 0, or 128 + the number of the signal that ended the run in order.

    Raises:
        TitanRLError: what ended the run.
    """
    for module in ("torch", "monarch", "vllm", "torchtitan", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(module, "cpu")
    with file_modes(share=config.share_run_dir):
        return _run_in(_open_run_dir(config, resume), config, begins=resume is None)


def _open_run_dir(config: RunConfig, resume: Path | None) -> RunDirectory:
    if resume is None:
        check_room(config, Path(config.run_dir))
        return RunDirectory.create(config)
    if not os.access(resume, os.W_OK | os.X_OK):
        raise ConfigError(f"--resume {resume}: the run cannot go on in a folder that you may not write to; copy it")
    check_room(config, resume, held=size_of(resume / "checkpoints"))
    return RunDirectory(resume)


def _run_in(run_dir: RunDirectory, config: RunConfig, *, begins: bool) -> int:
    with run_dir.locked():
        if begins:
            start = Resumption(None, RunState(settings=settings_of(config)))
            start.state.write(run_dir.path)
        else:
            start = resume_from_newest(config, run_dir)
        logging.basicConfig(filename=run_dir.logs / "controller.log", level=logging.INFO, format=LOG_FORMAT, force=True)
        logging.raiseExceptions = False  # a log that has no room on the disk is no news for the screen at every line
        for warning in throttles(config):
            logger.warning("%s", warning)
        messages = EndMessages(config, run_dir, start.state.step)
        with (
            StopSignals(STOPPING_EARLY, f"ended at once; {messages.cut_short()}") as signals,
            guarded(scratch_root(), run_dir.run_id, messages.cut_short()),
            run_environment(),
        ):
            try:
                code = run_to_its_end(_run_until_signal(config, run_dir, start, signals, messages))
            except (SystemExit, KeyboardInterrupt) as error:  # of what user code has begun: no signal raises here
                failure = TrainingError(f"an environment, a reward or the task exits Python: {describe(error)}")
                failure.add_note(messages.failed())
                raise failure from None
        if code:
            tell_on_stderr(messages.stopped())
        return code


async def _run_until_signal(
    config: RunConfig, run_dir: RunDirectory, start: Resumption, signals: StopSignals, messages: EndMessages
) -> int:
    """A signal cancels the run, which then ends as on a failure: a checkpoint, and no process left."""
    run = asyncio.ensure_future(_run(config, run_dir, start, signals, messages))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        run.cancel()
        signals.reacted()

    failure: BaseException | None = None
    try:
        with signals.stopping_with(lambda: loop.call_soon_threadsafe(stop)):
            await run
    except asyncio.CancelledError:
        if signals.received is None:
            raise
        return 128 + signals.received
    except BaseExceptionGroup as group:
        logger.error("the run ended", exc_info=group)
        failure = first_cause(group)
    except Exception as error:
        logger.error("the run ended", exc_info=error)
        failure = error
    if failure is not None:  # outside the handlers, so that its cause stays its own
        failure.add_note(messages.failed())
        raise failure
    return 0


async def _run(
    config: RunConfig, run_dir: RunDirectory, start: Resumption, signals: StopSignals, messages: EndMessages
) -> None:
    # Monarch writes to the terminal and opens sockets in TMPDIR when it is first used.
    from titan_rl.actors.generate_service import listening
    from titan_rl.actors.processes.transport import listen_below
    from titan_rl.actors.run_processes import start_processes
    from titan_rl.weights.board import VersionBoard
    from titan_rl.weights.segments.folder import clean_dead_segments

    await asyncio.sleep(0)  # a signal that came during those imports stops the run here
    task = config.task
    renderer = ChatTemplateRenderer.from_pretrained(config.model.path)
    with contextlib.ExitStack() as resources:
        progress = resources.enter_context(Progress(config.training.steps))
        signals.tell = progress.interrupt
        reporting = BestEffort("writing report.html", progress.message)
        resources.callback(reporting.attempt, partial(write_report, run_dir))
        sinks = resources.enter_context(open_sinks(config.logging, run_dir, progress.message))
        resources.callback(clean_dead_segments)  # of a trainer that was killed
        progress.message(f"run directory: {run_dir.path}")
        progress.message(f"starting {describe_processes(config)}")
        board = VersionBoard()
        journal = RunJournal(run_dir.journal, start.state.position, start.journal)
        resources.callback(journal.close)
        for loss in (*start.losses, *journal.losses):
            progress.message(loss)
        if journal.num_batches_again:
            progress.message(
                f"{journal.num_batches_again} steps after the checkpoint are trained again, on what they had"
            )
        resources.enter_context(LoopWatchdog(progress.message))
        resources.enter_context(listening(progress.message))
        listen_below(Path(tempfile.gettempdir()))
        async with start_processes(config, run_dir, board, progress.message) as processes:
            resources.enter_context(settled_heap())
            if start.checkpoint is not None:
                await processes.trainer.load(start.checkpoint)
                progress.message(f"continuing from {start.checkpoint}")
            router = GeneratorRouter(
                processes.replicas,
                make_strategy(config),
                stall_timeout_s=config.generation.stall_timeout_s,
                on_replica_failed=processes.on_replica_failed,
                limits=Limits(pull_s=config.statedict.pull_timeout_s, no_replica_s=config.generation.start_timeout_s),
            )
            controller = Controller(
                config,
                task,
                rollouter=processes.workers if config.rollout.num_workers else make_rollouter(config, renderer),
                router=router,
                trainer=processes.trainer,
                stop_token_ids=renderer.get_stop_token_ids(),
                board=board,
                run_dir=run_dir,
                log=sinks.log,
                progress=progress,
                journal=journal,
                start=start.state,
            )
            resources.callback(controller.close)
            resources.callback(lambda: messages.stands_at(controller.version))
            async with asyncio.TaskGroup() as background:
                watch = background.create_task(processes.watch(router), name="watch")
                standstill = Standstill(controller.progress, controller.waits_for, progress.message)
                silence = background.create_task(standstill.watch(), name="standstill")
                signals.stopping = STOPPING
                summary = await controller.run()
                watch.cancel()
                silence.cancel()
            await router.close()
            await processes.trainer.close()
    progress.summary(summary)


def describe_processes(config: RunConfig) -> str:
    """ "2 generators, 1 rollout worker and a trainer"."""
    counts = {"generator": config.generation.num_generators, "rollout worker": config.rollout.num_workers}
    named = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if count]
    return f"{', '.join(named)} and a trainer"


def make_strategy(config: RunConfig) -> Strategy:
    match config.routing.strategy:
        case "sticky":
            return StickySession(fallback=LeastLoaded(), max_sessions=config.routing.max_sessions)
        case "group_affinity":
            affinity = GroupAffinity(fallback=LeastLoaded())
            return StickySession(fallback=affinity, max_sessions=config.routing.max_sessions)
        case "consistent_hash":
            return ConsistentHash()
        case "least_loaded":
            return LeastLoaded()
        case "round_robin":
            return RoundRobin()


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run: titan_rl's own before others, and the first of several."""
    leaves = list(_leaves(group))
    return next((error for error in leaves if isinstance(error, TitanRLError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
