"""Training run, from a checked config to its end:

run_training   checks the components, and creates the run's folder and its session
_train         starts the processes, opens tasks, journal and trainer, and runs the controller's loop
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from titan_rl.cluster.processes.fork_server import forked_kinds
from titan_rl.cluster.processes.garbage_collection import settled_heap
from titan_rl.config.build import leave_out_long_prompts, open_rollouters
from titan_rl.config.hosts import check_own_machine
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Verbosity
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.rollout.group.rollouter import GroupRunner
from titan_rl.run.checks.requirements import check_needs
from titan_rl.run.components import Components, Planes, describe_processes, open_planes
from titan_rl.run.observability.summary import RunSummary
from titan_rl.run.observability.watchers import warn_of_stalls
from titan_rl.run.open_teachers import check_servers, open_teachers
from titan_rl.run.policy_training import PolicyTraining, show_notes
from titan_rl.run.process.environment import EXPOSED, OWN_NAMESPACE, file_modes, is_exposed
from titan_rl.run.resumption import open_run_dir
from titan_rl.run.session import RunSession, open_journal
from titan_rl.run.several_adapters import ExperimentsSession, train_adapters


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Outcome of a run that did not end with an error.

    Attributes:
        code: Exit code: 0, or 128 + the number of the signal that stopped the run.
        summary: Summary of the run; None if it was stopped.
    """

    code: int
    run_dir: Path
    summary: RunSummary | None = None


def run_training(
    config: RunConfig,
    resume: Path | None = None,
    *,
    components: Components | None = None,
    name: str | None = None,
    started_by: str | None = None,
    verbosity: Verbosity = Verbosity.NORMAL,
) -> RunEnd:
    """Run a config to its end.

    Args:
        resume: Folder of an earlier run with this config, which is continued from its newest checkpoint.
        components: Objects that replace those that the settings name.
        name: Last part of the name of a new run's folder; by default, the result of `run_name`.
        started_by: Command to name if the run fails before it has saved anything.

    Raises:
        TitanRLError: The error that ended the run.
    """
    components = components or Components()
    components.check(config)
    with file_modes(share=config.share_run_dir):
        check_own_machine(config.hosts)
        if components.needs_processes:
            check_needs(config)
        run_dir = open_run_dir(config, resume, name)
        session = (ExperimentsSession if config.adapters else RunSession[RunSummary])(
            config,
            run_dir,
            begins=resume is None,
            started_by=started_by,
            command="train",
            processes="titan_rl.cluster.run_processes" if components.needs_processes else None,
            forks=forked_kinds(config, trains=components.trainer is None, generates=components.replicas is None),
            others=components.sinks,
            verbosity=verbosity,
        )
        code = session.run(train_adapters if config.adapters else partial(_train, components))
        return RunEnd(code, run_dir.path, session.summary)


async def _train(
    components: Components, session: RunSession[RunSummary], resources: contextlib.AsyncExitStack
) -> RunSummary:
    config, run_dir, progress, start = session.config, session.run_dir, session.progress, session.start
    components = replace(components, provided=session.provided)
    if components.trainer is None:
        show_notes(config, progress)
    journal = resources.enter_context(open_journal(start, run_dir, progress))
    run = PolicyTraining(config, run_dir, progress, session.sinks, start, journal, components.published)
    await check_servers(config)  # before processes start, which takes longer
    async with asyncio.TaskGroup() as startup:  # during the start, which takes longer than a renderer's imports
        making = startup.create_task(components.make_renderer(config, progress), name="renderer")
        planes = await _start_planes(session, components, resources)
    renderer = making.result()
    resources.enter_context(LoopWatchdog(progress))  # after the imports, which block the event loop
    with progress.working("measuring the prompts"):
        context = config.model.max_context
        await in_thread(leave_out_long_prompts, config.sources, renderer, context, progress)
    group_runners: Mapping[str, GroupRunner]
    if planes.workers is not None:  # the workers open the tasks themselves
        group_runners = {source.name: planes.workers.of(source.name) for source in config.sources}
    else:
        with progress.working("opening the tasks"):
            opening = open_rollouters(config, run_dir.path, progress, renderer)
            group_runners = await resources.enter_async_context(opening)
    with progress.working("opening the teacher"):
        opening = open_teachers(config, run_dir.path, planes.router, renderer, progress)
        teachers = await resources.enter_async_context(opening)
    resources.enter_context(settled_heap())
    trainer = components.trainer
    if planes.training is not None:
        trainer = await resources.enter_async_context(run.open_trainer(planes.training))
    assert trainer is not None
    controller = await run.load_controller(
        trainer,
        planes.router,
        group_runners,
        renderer,
        filters=components.filters,
        hosts=planes.hosts,
        processes=planes.processes,
        teachers=teachers,
        workers=planes.workers,
    )
    watchers = {"stalls": warn_of_stalls(controller, progress), "following": progress.follow(controller)}
    async with session.training(planes, controller, **watchers):
        return await controller.run()


async def _start_planes(
    session: RunSession[RunSummary], components: Components, resources: contextlib.AsyncExitStack
) -> Planes[GeneratorRouter]:
    config, progress = session.config, session.progress
    described = describe_processes(config, components)
    if described and is_exposed():
        progress.message(f"{EXPOSED}; {OWN_NAMESPACE}")
    if described:
        progress.message(f"starting {described}")
    with progress.working(f"starting {described or 'generation and training'}"):
        opening = open_planes(config, components, session.run_dir, progress)
        return await resources.enter_async_context(opening)
