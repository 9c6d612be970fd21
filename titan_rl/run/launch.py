"""The story of a run, from a checked config to its end.

run_training   what the run needs is installed, and its folder is there; `run_in_order` calls the rest
_run           outputs are open, processes are started and wired, the controller trains; all of it is given back
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from titan_rl.cluster.processes.garbage import settled_heap
from titan_rl.config.build import find_token_texts, make_renderer, open_rollouters, told_of_template
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.cancellation import FirstError
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.rollout.group.rollouter import GroupRunner
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.checkpoints.resumption import Resumption
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory
from titan_rl.run.end_messages import EndMessages
from titan_rl.run.in_order import open_run_dir, run_in_order
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.machine.environment import EXPOSED, OWN_NAMESPACE, file_modes, is_exposed
from titan_rl.run.machine.requirements import check_needs
from titan_rl.run.machine.signals import STOPPING, StopSignals, tell_on_stderr
from titan_rl.run.observability.outputs import open_outputs
from titan_rl.run.observability.progress import Progress, Verbosity, status
from titan_rl.run.observability.summary import RunSummary
from titan_rl.run.observability.trace import traced
from titan_rl.run.observability.watchers import background_tasks, warn_of_shortage, warn_of_stalls
from titan_rl.run.parts import Parts, Planes, describe_processes, open_planes, use_monarch
from titan_rl.run.status import note_waiting
from titan_rl.run.trainer_recovery import open_trainer
from titan_rl.run.workers import workers_started
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
    verbosity: Verbosity = Verbosity.NORMAL,
) -> RunEnd:
    """Run a config to its end.

    Args:
        resume: the folder of an earlier run with this config, which is continued from its newest checkpoint.
        parts: in the place of what the settings name.
        name: of the folder of a run that begins; by default as of `run_name`.
        begun_by: the command to name where the run fails before there is anything to go on from.
        verbosity: how much the screen shows.

    Raises:
        TitanRLError: what ended the run.
    """
    parts = parts or Parts()
    parts.check(config)
    with file_modes(share=config.share_run_dir):
        check_own_machine(config.hosts)
        if parts.needs_processes:
            check_needs(config)
        run_dir = open_run_dir(config, resume, name)
        end = RunEnd(0, run_dir.path)

        async def program(
            config: RunConfig, run_dir: RunDirectory, start: Resumption, signals: StopSignals, messages: EndMessages
        ) -> None:
            given = run_dir, start, signals, messages
            if not parts.needs_processes:
                end.summary = await _run(parts, verbosity, config, *given)
                return
            async with workers_started(config, run_dir.logs, verbosity, signals.stop) as workers:
                hosts = replace(parts, provided=workers.provided)
                end.summary = await _run(hosts, verbosity, workers.config, *given)

        end.code = run_in_order(
            program,
            run_dir,
            config,
            begins=resume is None,
            begun_by=begun_by,
            starts_processes=parts.needs_processes,
        )
        return end


async def _run(
    parts: Parts,
    verbosity: Verbosity,
    config: RunConfig,
    run_dir: RunDirectory,
    start: Resumption,
    signals: StopSignals,
    messages: EndMessages,
) -> RunSummary:
    if parts.needs_processes:
        with status("loading what runs models", verbosity):
            importlib.import_module("titan_rl.cluster.run_processes")
    await asyncio.sleep(0)  # a signal that came until now stops the run here, before it says or starts anything
    if parts.needs_processes:
        use_monarch(config.hosts, tell_on_stderr)
    renderer = parts.renderer or make_renderer(config.model)
    outputs = open_outputs(config, run_dir, parts.sinks, step=start.state.step, verbosity=verbosity)
    first = FirstError()
    with first.wins(), outputs as (progress, sinks), contextlib.ExitStack() as resources:
        signals.tell = progress.end_with
        resources.callback(clean_dead_shards)  # of a trainer that was killed
        resources.enter_context(traced(config.logging, run_dir.trace, progress.message))
        progress.message(f"run directory: {run_dir.path}")
        if parts.trainer is None and parts.renderer is None and (note := told_of_template(config.model)):
            progress.message(note)
        journal = resources.enter_context(_journal(run_dir, start, progress.warning))
        resources.enter_context(LoopWatchdog(progress.warning))
        async with contextlib.AsyncExitStack() as opened:
            planes = await opened.enter_async_context(_started_planes(config, parts, run_dir, progress))
            opening = _group_runners(config, run_dir, planes, progress.message, renderer)
            with progress.working("opening the tasks"):
                group_runners = await opened.enter_async_context(opening)
            resources.enter_context(settled_heap())
            opening = open_trainer(parts.trainer, planes.training, config, journal, run_dir, parts.published, progress)
            trainer = await opened.enter_async_context(opening)
            if start.checkpoint is not None:
                with progress.working(f"loading {start.checkpoint}"):
                    start.loaded(await trainer.load(start.checkpoint))
                progress.message(f"continuing from {start.checkpoint}")
            controller = Controller(
                config,
                group_runners=group_runners,
                router=planes.router,
                trainer=trainer,
                stop_token_ids=renderer.get_stop_token_ids(),
                published=parts.published,
                run_dir=run_dir,
                log=sinks.log,
                progress=progress,
                journal=journal,
                start=start.state,
                token_texts=find_token_texts(config.model),
                filters=parts.filters,
                hosts=planes.hosts,
            )
            if planes.training is not None:
                planes.training.before_leaving = controller.save_soon
            resources.callback(controller.close)
            resources.callback(lambda: messages.stands_at(controller.version))
            watchers = {
                "watch": planes.watch(),
                "shortage": warn_of_shortage(planes, progress.warning, partial(note_waiting, run_dir.path)),
                "stalls": warn_of_stalls(controller, progress.warning),
                "following": progress.follow(controller.look),
            }
            with first.source():
                async with background_tasks(**watchers):
                    signals.stopping = STOPPING
                    return await controller.run()


@contextlib.asynccontextmanager
async def _started_planes(
    config: RunConfig, parts: Parts, run_dir: RunDirectory, progress: Progress
) -> AsyncGenerator[Planes]:
    """`open_planes`, of which a person sees that it goes on."""
    described = describe_processes(config, parts)
    if described and is_exposed():
        progress.message(f"{EXPOSED}; {OWN_NAMESPACE}")
    if described:
        progress.message(f"starting {described}")
    async with contextlib.AsyncExitStack() as opened:
        with progress.working(f"starting {described or 'generation and training'}"):
            planes = await opened.enter_async_context(open_planes(config, parts, run_dir, progress.warning))
        yield planes


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
