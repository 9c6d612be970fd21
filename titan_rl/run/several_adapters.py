"""Several experiments in one run, each of which trains its own adapter: `[[adapters]]`.

Each experiment is a training run like any other: a `Controller` with its own scheduler, rollouts, journal, checkpoints,
metrics and exported policy, in the folder `adapters/NAME` of the run. They share:

    the generators   each experiment has its own router over the same engines, whose batches mix adapters
    the trainer      one process with the frozen weights and a trainer for each adapter; each gets a fair share of time
                     (`scheduling/fair_turns.py`)

If an experiment fails, only that experiment stops. The run ends once all experiments have ended. If some failed, it
raises an error that names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.cluster.processes.garbage_collection import settled_heap
from titan_rl.config.build import leave_out_long_prompts, open_rollouters
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.cancellation import FirstError, stray_cancellation_fails
from titan_rl.core.calls.threads import in_thread
from titan_rl.core.calls.user_code import reason
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.errors import AdaptersFailedError
from titan_rl.core.run_files import ADAPTERS
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.rollout.renderer import Renderer
from titan_rl.run.components import Components, Planes, describe_processes, open_adapter_planes
from titan_rl.run.controller import Controller
from titan_rl.run.directory import RunDirectory, check_files
from titan_rl.run.journal.state import RunState
from titan_rl.run.observability.progress import Progress, ShownStep
from titan_rl.run.observability.sinks import open_sinks
from titan_rl.run.observability.summary import RunSummary
from titan_rl.run.observability.watchers import Progressing, background_tasks, warn_of_stalls
from titan_rl.run.policy_training import PolicyTraining, show_notes
from titan_rl.run.process.signals import first_cause
from titan_rl.run.resumption import Resumption, begin_run, find_resumptions, is_finished, resume_from_newest
from titan_rl.run.session import EndMessages, RunSession, open_journal
from titan_rl.run.shared_trainer import SharedTrainers
from titan_rl.run.stages.validation import MEAN
from titan_rl.run.status import status_kept
from titan_rl.scheduling.fair_turns import FairTurns
from titan_rl.training.state.checkpoint import latest, step_of

if TYPE_CHECKING:
    from titan_rl.cluster.adapter_routers import AdapterRouters

logger = logging.getLogger(__name__)


class RunMetrics:
    """Metrics of the run itself: for each experiment, its steps, its share of the trainer's time, and whether it
    failed.

    Args:
        sink: Metric sink of the run.
        steps: Steps so far, by experiment.
    """

    def __init__(self, sink: MetricSink, turns: FairTurns, steps: Mapping[str, int]) -> None:
        self._sink = sink
        self._turns = turns
        self._steps = dict(steps)
        self._failed: set[str] = set()

    def reached(self, name: str, step: int) -> None:
        """Note a step of an experiment."""
        if step > self._steps[name]:
            self._steps[name] = step
            self._log()

    def failed(self, name: str) -> None:
        """Note that an experiment has failed."""
        self._failed.add(name)
        self._log()

    def _log(self) -> None:
        metrics: dict[str, float] = {}
        for name, step in self._steps.items():
            metrics |= {
                f"adapter/{name}/step": float(step),
                f"adapter/{name}/trainer_share": self._turns.share(name),
                f"adapter/{name}/failed": float(name in self._failed),
            }
        self._sink.log(sum(self._steps.values()), metrics)


class ExperimentProgress(Progress):
    """Progress of one experiment. Its lines in the display of the run begin with its name.

    Args:
        run: Display of the run.
        metrics: Metrics of the run, which count the experiment's steps.
        name: Name of the experiment.
    """

    def __init__(self, total: int, run: Progress, metrics: RunMetrics, name: str) -> None:
        super().__init__(total)
        self._run = run
        self._metrics = metrics
        self._name = name

    def message(self, text: str) -> None:
        self._run.message(f"{self._name}: {text}")

    def warning(self, text: str) -> None:
        self._run.warning(f"{self._name}: {text}")

    def step(self, report: ShownStep) -> None:
        self._metrics.reached(self._name, report.step)
        name, value, note = report.curve
        figures = "  ".join(f"{label} {figure}" for label, figure in report.figures.items())
        self.message(f"step {report.step}/{self._total}  {name} {value:.3f}{note}  {figures}  {report.seconds:.2f} s")


class Experiment:
    """One experiment of a run.

    Attributes:
        summary: Result of the experiment, even if it was finished before this process; None until it is finished.
        error: Error that ended the experiment, if it failed.
        controller: Training loop; None until the experiment trains.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, name: str, config: RunConfig, folder: Path) -> None:
        self.name = name
        self.config = config
        path = folder / ADAPTERS / name
        self.begins = not (path / "run_state.json").is_file()
        if not self.begins:
            check_files(path)
        self.run_dir = RunDirectory(path)
        self.summary = self._past_summary() if is_finished(config, self.run_dir) else None
        self.error: Exception | None = None
        self.controller: Controller | None = None

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint."""
        checkpoint = latest(self.run_dir.checkpoints)
        return 0 if checkpoint is None else step_of(checkpoint)

    @property
    def step(self) -> int:
        """Step that was trained last. It may not be saved."""
        return self.saved_step if self.controller is None else self.controller.version

    @property
    def unsaved(self) -> str | None:
        """Text such as "step 5 is not saved: the newest checkpoint is of step 3"; None if the last step is saved."""
        saved = self.saved_step
        if self.step <= saved:
            return None
        newest = f"the newest checkpoint is of step {saved}" if saved else "there is no checkpoint"
        return f"step {self.step} is not saved: {newest}"

    def failed(self) -> str:
        """Message about the experiment's failure."""
        assert self.error is not None
        unsaved = f" ({self.unsaved})" if self.unsaved else ""
        return f"failed at step {self.step}{unsaved}, and the others continue: {reason(self.error)}"

    def _past_summary(self) -> RunSummary:
        """Read the summary of a finished experiment from its files."""
        checkpoint = latest(self.run_dir.checkpoints)
        assert checkpoint is not None
        state, run_dir = RunState.read(checkpoint), self.run_dir
        reward = run_dir.metric(state.step, MEAN)
        return RunSummary(state.reward_before, reward, state.step, state.tokens, run_dir.elapsed_s, run_dir.path)

    def begin(self) -> Resumption:
        """Begin the experiment, or resume it from its newest checkpoint.

        Raises:
            ConfigError, CheckpointError: The experiment cannot be resumed.
        """
        if self.begins:
            self.run_dir.write_config(self.config)
            return begin_run(self.config, self.run_dir)
        return resume_from_newest(self.config, self.run_dir)


class ExperimentStalls:
    """Progress of one experiment, for stall warnings. Waiting behind others that make progress, for a turn at the
    trainer or for an engine that is busy with other requests, is not a stall."""

    def __init__(self, run: Progressing, router: GeneratorRouter, turns: FairTurns, name: str) -> None:
        self._run = run
        self._router = router
        self._turns = turns
        self._name = name

    def progress(self) -> object:
        return self._run.progress(), self._turns.progress_ahead_of(self._name), self._router.last_seen_at

    def waits_for(self) -> str:
        turn = self._turns.waits_for(self._name)
        return "; ".join(filter(None, [turn and f"it waits for {turn}", self._run.waits_for()]))


class Experiments:
    """Concurrent training of the experiments of a run.

    Args:
        session: Session of the run.
        planes: Running generators and trainer.
    """

    def __init__(
        self,
        session: RunSession[RunSummary],
        experiments: list[Experiment],
        planes: Planes[AdapterRouters],
        renderer: Renderer,
    ) -> None:
        self._run_dir = session.run_dir
        self._progress = session.progress
        self._experiments = experiments
        self._planes = planes
        self._renderer = renderer
        turns = self._turns = FairTurns(experiment.name for experiment in experiments)
        assert planes.training is not None
        self._trainers = SharedTrainers(planes.training, turns, session.config.hosts.max_respawns)
        steps = {experiment.name: experiment.saved_step for experiment in experiments}
        self._metrics = RunMetrics(session.sinks, turns, steps)

    async def run(self) -> RunSummary:
        """Run all experiments to their ends. The failure of one does not affect the others.

        Returns:
            Summary of the run, with the summaries of all experiments.

        Raises:
            AdaptersFailedError: Some of the experiments failed.
        """
        async with asyncio.TaskGroup() as running:
            for experiment in self._experiments:
                if experiment.summary is not None:
                    self._progress.message(f"{experiment.name}: all steps were trained before")
                else:
                    running.create_task(self._run(experiment), name=experiment.name)
        failed = {each.name: each.error for each in self._experiments if each.error is not None}
        finished = {each.name: each.summary for each in self._experiments if each.summary is not None}
        if failed:
            reasons = "; ".join(f"{name}: {reason(error)}" for name, error in failed.items())
            text = f"{len(failed)} of {len(self._experiments)} adapters failed: {reasons}"
            raise AdaptersFailedError(text, failed, finished)
        return RunSummary.of_adapters(finished, self._run_dir.path, self._run_dir.elapsed_s)

    async def _run(self, experiment: Experiment) -> None:
        total = experiment.config.training.steps
        progress = ExperimentProgress(total, self._progress, self._metrics, experiment.name)
        try:
            with experiment.run_dir.locked(), status_kept(experiment.run_dir.path, begins=experiment.begins):
                first = FirstError()
                try:
                    with stray_cancellation_fails(f"adapter {experiment.name}"), first.wins():
                        async with contextlib.AsyncExitStack() as resources:
                            with first.source():
                                summary = await self._train(experiment, progress, resources)
                    experiment.summary = summary
                except BaseExceptionGroup as group:
                    error = first_cause(group)
                    raise error from error.__cause__
        except Exception as error:
            logger.error("adapter %s failed", experiment.name, exc_info=error)
            experiment.error = error
            progress.warning(experiment.failed())
            self._metrics.failed(experiment.name)
        else:
            progress.message(f"finished {summary.result}")

    async def _train(
        self, experiment: Experiment, progress: Progress, resources: contextlib.AsyncExitStack
    ) -> RunSummary:
        name, config, run_dir = experiment.name, experiment.config, experiment.run_dir
        start = await in_thread(experiment.begin)
        show_notes(config, progress)
        routers = self._planes.router
        router, published = routers.by_adapter[name], routers.published[name]
        resources.push_async_callback(routers.close_router, name)
        opened = open_sinks(config.logging, run_dir, progress, step=start.state.step)
        sinks = resources.enter_context(opened)
        journal = resources.enter_context(open_journal(start, run_dir, progress))
        run = PolicyTraining(config, run_dir, progress, sinks, start, journal, published)
        context = config.model.max_context
        await in_thread(leave_out_long_prompts, config.sources, self._renderer, context, progress)
        opening = open_rollouters(config, run_dir.path, progress, self._renderer)
        runners = await resources.enter_async_context(opening)
        trainer = await resources.enter_async_context(run.open_trainer(self._trainers.of(name)))
        controller = experiment.controller = await run.load_controller(
            trainer, router, runners, self._renderer, processes=self._planes.processes
        )
        stalls = ExperimentStalls(controller, router, self._turns, name)
        async with background_tasks(
            stalls=warn_of_stalls(stalls, progress),
            following=progress.follow(controller),
            generators=routers.stopped(name),
        ):
            return await controller.run()


class ExperimentsSession(RunSession[RunSummary]):
    """Session of a run of several experiments."""

    @property
    def num_steps(self) -> int:
        return sum(experiment.training.steps for experiment in self.config.experiments.values())

    def _begin(self) -> Resumption:
        if self._begins:
            return begin_run(self.config, self.run_dir)
        found = find_resumptions(self.config, self.run_dir)
        changes = dict.fromkeys(change for start in found.values() for change in start.changes)
        self.run_dir.become_latest()
        self.run_dir.write_config(self.config)
        return Resumption(None, RunState.read(self.run_dir.path), changes=tuple(changes))

    def _end_messages(self) -> EndMessages:
        return ExperimentMessages(self.config, self.run_dir, 0, self._started_by, self._command)


class ExperimentMessages(EndMessages):
    """Closing messages of a run of several experiments.

    Attributes:
        experiments: Experiments of the run; none until they begin.
    """

    experiments: Sequence[Experiment] = ()

    def stopped(self) -> str:
        return f"stopped; {self._saved()}; to continue: {self._command}"

    def failed(self) -> str:
        return f"{self._saved()}; fix the error, then continue with: {self._command}"

    def _saved(self) -> str:
        unsaved = [f"{each.name}: {text}" for each in self.experiments if (text := each.unsaved) is not None]
        return "; ".join(unsaved) or "the trained steps of all adapters are saved"


async def train_adapters(session: RunSession[RunSummary], resources: contextlib.AsyncExitStack) -> RunSummary:
    """Run the experiments of a run to their ends.

    Raises:
        AdaptersFailedError: Some of the experiments failed.
        TitanRLError: The error that ended the run.
    """
    config, run_dir, progress = session.config, session.run_dir, session.progress
    experiments = [Experiment(name, each, run_dir.path) for name, each in config.experiments.items()]
    if isinstance(session.messages, ExperimentMessages):
        session.messages.experiments = experiments
    adapters = f"{len(experiments)} adapter{'s' * (len(experiments) > 1)}"
    progress.message(f"starting {describe_processes(config, Components())} of {adapters}")
    with progress.working("starting generators and trainer"):
        planes = await resources.enter_async_context(open_adapter_planes(config, run_dir, progress))
    renderer = await Components().make_renderer(config, progress)
    resources.enter_context(LoopWatchdog(progress))
    resources.enter_context(settled_heap())
    running = Experiments(session, experiments, planes, renderer)
    async with session.training(planes):
        return await running.run()
