"""Session of a command: setup before its work, and teardown after it, even if the work fails.

process_session   for `train`, `sft`, `eval` and `serve`: log file, signals, a guard process, environment variables
RunSession        in addition for `train` and `sft`: the run's folder, the state from which it resumes, status.json,
                  the report, hosts, screen, metric sinks and trace
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from titan_rl.cluster.hosts.elastic import ProvidedHosts
from titan_rl.cluster.hosts.folders import scratch_root
from titan_rl.cluster.processes.fork_server import fork_servers
from titan_rl.config.concurrency import throttles
from titan_rl.config.run import RunConfig
from titan_rl.core.calls.cancellation import FirstError, stray_cancellation_fails
from titan_rl.core.calls.user_code import describe
from titan_rl.core.console import Console, Verbosity
from titan_rl.core.errors import CheckpointError, TrainingError
from titan_rl.core.tracing.spans import recording
from titan_rl.metrics.sinks.types import MetricSink
from titan_rl.run.components import Planes
from titan_rl.run.directory import RunDirectory
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState, list_segments, read_segments
from titan_rl.run.observability.progress import Progress
from titan_rl.run.observability.sinks import Sinks, open_sinks
from titan_rl.run.observability.watchers import background_tasks, warn_of_shortage
from titan_rl.run.open_host_workers import open_workers
from titan_rl.run.process.environment import allow_open_files, logging_to, run_environment
from titan_rl.run.process.guard import guarded
from titan_rl.run.process.signals import StopSignals, run_to_its_end
from titan_rl.run.resumption import Resumption, begin_run, is_finished, resume_from_newest
from titan_rl.run.status import report_written, status_kept
from titan_rl.run.terminal.standard_streams import write_stderr_unbuffered
from titan_rl.run.training_loop import TrainingLoop
from titan_rl.training.state.checkpoint import latest, step_of
from titan_rl.weights.shard_files import clean_dead_shards

logger = logging.getLogger(__name__)

TRACE_BYTES = 32 << 20
"""Maximum size of a process's trace in bytes."""

STOPPING = (
    "stopping: the run finishes the step that is being trained and saves it; a second signal ends the run at once, "
    "without saving"
)
STOPPING_EARLY = (
    "stopping: the run is still being set up, and has trained nothing that is not saved; a second signal ends it at "
    "once"
)


@dataclass(frozen=True, slots=True)
class SessionFiles:
    """Log folder of a command's processes, and the name under which they share weights."""

    run_id: str
    logs: Path


@contextlib.contextmanager
def process_session(
    run_id: str,
    pythonpath: Sequence[str],
    *,
    stopping: str,
    ended: str,
    starts_processes: bool = True,
    forks: Sequence[str] = (),
    run: Path | None = None,
) -> Generator[StopSignals]:
    """Prepare this process, and the processes that it starts, for a block.

    Signals are handled, and the process is guarded, only if this is the main thread. In a notebook, whose event loop
    runs, signals have their usual effect.

    Args:
        run_id: Part of the names of shared memory, which the guard frees.
        stopping: Message after the first signal.
        ended: Message after the second signal, which ends the process at once.
        starts_processes: Whether the process gets environment variables for other processes.
        forks: Kinds of processes that are forked from servers, see `forked_kinds`.
        run: Folder of a run whose status says that it was stopped if the second signal ends it.
    """
    signals = StopSignals(stopping, ended, run=run)
    is_main = threading.current_thread() is threading.main_thread()
    owns_process = asyncio._get_running_loop() is None  # not in a notebook, which must outlive the run
    if starts_processes:
        allow_open_files()
    with contextlib.ExitStack() as resources:
        if is_main and owns_process:
            resources.enter_context(signals)
        if is_main:
            resources.enter_context(guarded(scratch_root(), run_id, ended, run, ends_at_second=owns_process))
        if starts_processes:
            resources.enter_context(run_environment(pythonpath))
            resources.enter_context(fork_servers(forks))
        yield signals


S = TypeVar("S")


class RunSession(Generic[S]):
    """Session of one run of `titan-rl train` or `titan-rl sft`.

    Attributes:
        config: Settings of the run. Once the provider's workers have started, they have the workers' addresses instead
            of the provider.
        start: State that the run begins or resumes from.
        provided: Hosts of a provider whose hosts join and leave; None if the hosts stay the same.
        progress: Progress display of the run; available during its work.
        sinks: Metric sinks of the run; available during its work.
        summary: Result of the work; None until it has ended.

    Args:
        begins: Whether the run is new, not resumed.
        started_by: Command to name if the run fails before it has saved anything.
        command: Command of `titan-rl` that resumes the run.
        processes: Module that starts the run's processes; None if the run starts none.
        forks: Kinds of processes that are forked from servers, see `forked_kinds`.
        others: Metric sinks besides those that the settings name, by their names for messages.
    """

    start: Resumption
    signals: StopSignals
    messages: EndMessages
    progress: Progress
    sinks: Sinks

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDirectory,
        *,
        begins: bool,
        started_by: str | None,
        command: str,
        processes: str | None,
        forks: Sequence[str] = (),
        others: Mapping[str, MetricSink] | None = None,
        verbosity: Verbosity = Verbosity.NORMAL,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.provided: ProvidedHosts | None = None
        self.summary: S | None = None
        self._begins = begins
        self._started_by = started_by if begins else None
        self._command = command
        self._processes = processes
        self._forks = forks
        self._others = others
        self._verbosity = verbosity
        self._error = FirstError()

    def run(self, work: Callable[[RunSession[S], contextlib.AsyncExitStack], Coroutine[Any, Any, S]]) -> int:
        """Run the work from the current state of the run, so that it can be stopped at any time.

        Args:
            work: Body of the run, which returns its summary. It registers resources with the stack, which closes them.

        Returns:
            The exit code: 0, or 128 + the number of the signal after which the run was shut down.

        Raises:
            TitanRLError: The error that ended the run.
        """
        config, run_dir, first = self.config, self.run_dir, FirstError()
        with first.wins(), run_dir.locked(), logging_to(run_dir.logs / "controller.log"):
            self.start = self._begin()
            for warning in throttles(config):
                logger.warning("%s", warning)
            self.messages = self._end_messages()
            with (
                report_written(run_dir.path, run_dir.report),
                status_kept(run_dir.path, begins=self._begins, changes=self._described_changes()) as status,
                process_session(
                    run_dir.run_id,
                    config.pythonpath,
                    stopping=STOPPING_EARLY,
                    ended=f"ended at once; {self.messages.cut_short()}",
                    starts_processes=self._processes is not None,
                    forks=self._forks,
                    run=run_dir.path,
                ) as self.signals,
                first.source(),
            ):
                try:
                    run_to_its_end(self._run(work))
                    if (code := self.signals.code) and not self.messages.is_finished:
                        status.state = "stopped"
                except Exception as error:
                    error.add_note(self.messages.failed())
                    raise
                except (SystemExit, KeyboardInterrupt) as error:  # raised by user code: signals raise nothing
                    failure = TrainingError(f"an environment, a reward or the task exited Python: {describe(error)}")
                    failure.add_note(self.messages.failed())
                    raise failure from None
            if code:
                write_stderr_unbuffered(self.messages.stopped())
            return code

    def _begin(self) -> Resumption:
        if not self._begins:
            start = resume_from_newest(self.config, self.run_dir)
            self.run_dir.become_latest()
            return start
        return begin_run(self.config, self.run_dir)

    def _end_messages(self) -> EndMessages:
        return EndMessages(self.config, self.run_dir, self.start.state.step, self._started_by, self._command)

    @property
    def num_steps(self) -> int:
        """Number of steps that the progress display counts to."""
        return self.config.training.steps

    async def _run(self, work: Callable[[RunSession[S], contextlib.AsyncExitStack], Coroutine[Any, Any, S]]) -> None:
        with self.signals.ending_in_order(), stray_cancellation_fails("the run"):
            async with contextlib.AsyncExitStack() as hosts:
                if self._processes is not None:
                    opening = open_workers(
                        self.config,
                        self.run_dir.logs,
                        self._processes,
                        verbosity=self._verbosity,
                        signals=self.signals,
                    )
                    workers = await hosts.enter_async_context(opening)
                    self.config, self.provided = workers.config, workers.provided
                await asyncio.sleep(0)  # a signal that has already arrived stops the run here
                with self._error.wins():
                    async with contextlib.AsyncExitStack() as resources:
                        self._open_outputs(resources)
                        summary = await work(self, resources)
            self.summary = summary

    def _described_changes(self) -> list[str]:
        at = f" at step {self.start.state.step}" if self.start.state.step else ""
        return [f"resumed{at}: {change}" for change in self.start.changes]

    def _open_outputs(self, resources: contextlib.AsyncExitStack) -> None:
        logging, step = self.config.logging, self.start.state.step
        self.progress = resources.enter_context(Progress(self.num_steps, verbosity=self._verbosity))
        self.sinks = resources.enter_context(open_sinks(logging, self.run_dir, self.progress, self._others, step=step))
        self.signals.console = self.progress
        resources.callback(clean_dead_shards)  # left by a trainer that was killed
        if logging.trace:
            tracing = recording(self.run_dir.trace, "controller", TRACE_BYTES, self.progress)
            resources.enter_context(tracing)
        self.progress.message(f"run directory: {self.run_dir.path}")

    @contextlib.asynccontextmanager
    async def training(
        self, planes: Planes[Any], loop: TrainingLoop[S] | None = None, **watchers: Coroutine[Any, Any, object]
    ) -> AsyncGenerator[None]:
        """Run the watchers of a run's processes, and further ones, named by their keywords, alongside the block,
        which trains.

        An error of the block is raised even if closing the run also fails. From now on, a signal stops the run with a
        checkpoint.

        Args:
            loop: Training loop that the block runs, if it is the only one of the run.
        """
        if loop is not None and planes.training is not None:
            planes.training.before_leaving = loop.save_soon
        shortage = warn_of_shortage(planes, self.progress, self.run_dir.path)
        try:
            with self._error.source():
                async with background_tasks(watch=planes.watch(), shortage=shortage, **watchers):
                    self.signals.stopping = STOPPING
                    yield
        finally:
            if loop is not None:
                self.messages.note_step(loop.version)


@contextlib.contextmanager
def open_journal(start: Resumption, run_dir: RunDirectory, console: Console) -> Generator[RunJournal]:
    """Open the journal of a run, and warn of its losses and of the steps that the run repeats."""
    journal = RunJournal(run_dir.journal, start.state.position, start.journal)
    with contextlib.closing(journal):
        for loss in (*start.losses, *journal.losses):
            console.warning(loss)
        if (again := journal.num_batches_again) == 1:
            console.warning("1 step after the checkpoint is trained again, on the same groups")
        elif again:
            console.warning(f"{again} steps after the checkpoint are trained again, on the same groups")
        yield journal


class EndMessages:
    """Closing messages of a run that ends before its last step.

    Args:
        step: Step of the checkpoint from which the run begins.
        started_by: Command that started the run; None if the run is resumed.
        command: Command of `titan-rl` that resumes the run.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDirectory,
        step: int,
        started_by: str | None = None,
        command: str = "train",
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._step = step
        self._started_by = started_by
        self._command = shlex.join(["titan-rl", command, "--resume", str(run_dir.path)])

    def note_step(self, step: int) -> None:
        """Set the step that was trained last."""
        self._step = step

    def stopped(self) -> str:
        """Message after a graceful stop: "stopped with step 3 saved; to continue: titan-rl train --resume
        runs/latest"."""
        if (finished := self._finished()) is not None:
            return f"stopped when {finished}"
        if (unsaved := self._unsaved()) is not None:
            return f"stopped at {unsaved}; to continue from {self._start()}: {self._command}"
        saved = f"with step {self._step} saved" if self._step else "before a step was trained"
        return f"stopped {saved}; to continue: {self._command}"

    def failed(self) -> str:
        """Message after an error that ended the run."""
        if (finished := self._finished()) is not None:
            return finished
        if (unsaved := self._unsaved()) is not None:
            return (
                f"the run ended at {unsaved}; fix the error, then continue from {self._start()} with: {self._command}"
            )
        if self._started_by is not None and not self._step and self._has_no_journal():
            return f"nothing was trained or saved; fix the error, then run: {self._started_by}"
        saved = f"step {self._step} is saved; " if self._step else ""
        return f"{saved}fix the error, then continue with: {self._command}"

    @property
    def is_finished(self) -> bool:
        """Whether no steps are left."""
        return self._finished() is not None

    def cut_short(self) -> str:
        """Message after an immediate end, written when the run begins: later no code may run."""
        return f"checkpoints that were saved are kept; to continue: {self._command}"

    def _finished(self) -> str | None:
        """Message about a finished run; None if steps are left."""
        if not is_finished(self._config, self._run_dir):
            return None
        return f"all steps were trained and saved: the run is finished, its policy is {self._run_dir.export}"

    def _unsaved(self) -> str | None:
        """Text about the step that was trained last, if it is not saved; otherwise None."""
        checkpoint = latest(self._run_dir.checkpoints)
        if self._step <= (0 if checkpoint is None else step_of(checkpoint)):
            return None
        return f"step {self._step}, which is not saved"

    def _has_no_journal(self) -> bool:
        """Return whether the journal has no answers that a resumed run could use."""
        try:
            position = RunState.read(self._run_dir.path).position
            state = read_segments(list_segments(self._run_dir.journal), position).state
        except CheckpointError:
            return False
        return not (state.finished or state.completions)

    def _start(self) -> str:
        """Text about the point from which the run would resume."""
        checkpoint = latest(self._run_dir.checkpoints)
        return (
            "step 0, because there is no checkpoint"
            if checkpoint is None
            else f"step {step_of(checkpoint)}, {checkpoint}"
        )
