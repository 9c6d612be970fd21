"""Rollout workers: processes that run groups, their pool in the controller, and the service that generates for them.

Environments, parsing and scoring hold Python's lock, and each process has its own."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.processes.answers import ActorHandle, AnsweringActor
from titan_rl.cluster.processes.process import ProcessActor, ProcessSpec
from titan_rl.cluster.processes.remote_process import RemoteProcess, call
from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.calls.threads import UsersThreads
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Console
from titan_rl.core.errors import ActorDiedError, RequestError
from titan_rl.generation.request import EngineRequest
from titan_rl.rollout.copies import portable
from titan_rl.rollout.group.rollouter import Callbacks
from titan_rl.rollout.group.turns import generate_within
from titan_rl.rollout.types import Rollout, RolloutGroup, sample_alone
from titan_rl.types import Completion, GenerateFn, SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutWorkerSettings:
    """Settings of a worker process. The task is imported there, by its name in the resolved settings."""

    config_path: Path  # there, as the next
    model_path: Path


class RolloutWorkerActor(ProcessActor):
    """Runs a `Rollouter` for each task, whose `GenerateFn` is a call to the controller."""

    def __init__(self, spec: ProcessSpec, settings: RolloutWorkerSettings, service: Any) -> None:
        super().__init__(spec)
        self._settings = settings
        self._service = ActorHandle(service)
        self._groups: dict[str, asyncio.Task[RolloutGroup]] = {}

    @concurrent_endpoint
    async def start(self) -> None:
        """Open the tasks.

        Raises:
            ConfigError: a task cannot be imported here.
        """
        from titan_rl.config.build import open_rollouters
        from titan_rl.config.load import load_config

        asyncio.get_running_loop().set_default_executor(UsersThreads())  # the process ends without what hangs there
        console = _ControllerConsole(self._spec.name, self._service)
        config_path = self._settings.config_path
        config = load_config(config_path, [("model.path", str(self._settings.model_path))], check_files=False)
        # Both for as long as the process lives.
        self._opened = open_rollouters(config, config_path.parent, console)
        self._rollouters = await self._opened.__aenter__()
        self._watchdog = LoopWatchdog(console)
        self._watchdog.__enter__()  # after the imports

    @concurrent_endpoint
    async def run_group(
        self, handler: str, sample: Any, group_id: str, group_size: int, sampling: SamplingParams, task: str
    ) -> RolloutGroup:
        """Run a group of the named task with the handler of this key; see `Rollouter.run_group`. Returns plain data
        without the sample, because environments may keep in messages and samples what does not pickle."""
        finishing: list[asyncio.Future[None]] = []

        def on_finished(rollout: Rollout) -> None:
            finishing.append(asyncio.ensure_future(self._tell_finished(handler, portable(rollout))))

        running = self._groups[group_id] = asyncio.ensure_future(
            self._rollouters[task].run_group(
                partial(self._generate, handler),
                sample,
                group_id=group_id,
                group_size=group_size,
                sampling=sampling,
                on_finished=on_finished,
            )
        )
        try:
            group = await running
            await asyncio.gather(*finishing)
            return replace(group, sample=None, rollouts=[portable(rollout) for rollout in group.rollouts])
        finally:
            del self._groups[group_id]

    @concurrent_endpoint
    async def cancel(self, group_id: str) -> None:
        """Close the environments of a group. One that has ended is no error."""
        if (task := self._groups.get(group_id)) is not None:
            task.cancel()

    @concurrent_endpoint
    async def pause_judging(self, task: str) -> None:
        self._rollouters[task].pause_judging()

    @concurrent_endpoint
    async def resume_judging(self, task: str) -> None:
        self._rollouters[task].resume_judging()

    async def _tell_finished(self, handler: str, rollout: Rollout) -> None:
        await call(self._service.finished, handler, rollout, who="controller")

    async def _generate(
        self,
        handler: str,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        watch = stopwatch.current()
        assert watch is not None, "the rollouter times every request"
        request = EngineRequest(request_id, prompt_token_ids, sampling, session_id)
        with stopwatch.paused():  # the controller, where it is known whether the request waits, counts
            completion, own_s = await call(self._service.generate, handler, request, watch.left_s, who="controller")
        watch.charge(own_s)
        return completion


T = TypeVar("T")


_numbers = count()


class GroupHandler:
    """Requests of one group that runs in a worker. Belongs to the event loop that made it.

    Attributes:
        key: what the worker calls it by. No other handler has it: a group that runs again has the same ids, and what a
            dead worker had sent may arrive when that has begun.
    """

    def __init__(self, group_id: str, generate: GenerateFn, on_finished: Callable[[Rollout], None] | None) -> None:
        self.key = f"{group_id}#{next(_numbers)}"
        self._closed = False
        self._generate = generate
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Completion]] = set()

    async def generate(self, request: EngineRequest, time_left_s: float) -> tuple[Completion, float]:
        """Generate in the handler's event loop, within the time that the rollout has left. May be called from any event
        loop.

        Returns:
            The completion, and the seconds of the rollout's own that it took.

        Raises:
            RequestError: the handler is closed.
        """

        async def on_loop() -> tuple[Completion, float]:
            self._check_open()
            watch = Stopwatch(time_left_s)
            task = asyncio.ensure_future(request.sent_to(partial(generate_within, watch, self._generate)))
            self._tasks.add(task)
            try:
                return await task, watch.used_s
            finally:
                self._tasks.discard(task)

        return await self._run(on_loop())

    async def finished(self, rollout: Rollout) -> None:
        async def on_loop() -> None:
            self._check_open()
            if self._on_finished is not None:
                self._on_finished(rollout)

        await self._run(on_loop())

    async def close(self) -> None:
        """Cancel what the group still asks for, and refuse what it asks for later. Called on the handler's own loop."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check_open(self) -> None:
        if self._closed:
            raise _unwanted(self.key)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


_handlers: dict[str, GroupHandler] = {}  # by key; the actor lives in the process that fills it


@contextmanager
def handling(handler: GroupHandler) -> Generator[None]:
    """Register `handler`, so that workers reach it through the service under its key within the block."""
    _handlers[handler.key] = handler
    try:
        yield
    finally:
        del _handlers[handler.key]


def handler_of(key: str) -> GroupHandler:
    """Handler with this key.

    Raises:
        RequestError: there is none: the group has ended, or runs again in another worker.
    """
    if (handler := _handlers.get(key)) is None:
        raise _unwanted(key)
    return handler


def _unwanted(key: str) -> RequestError:
    return RequestError(f"group {key.rpartition('#')[0]!r} was withdrawn from this worker")


_consoles: list[Console] = []


@contextmanager
def shown_on(console: Console) -> Generator[None]:
    """Show the lines of workers on this process's console, within the block."""
    _consoles.append(console)
    try:
        yield
    finally:
        _consoles.remove(console)


class _ControllerConsole(Console):
    """Console of a worker, whose lines are shown by the controller's."""

    def __init__(self, worker: str, service: Any) -> None:
        self._worker = worker
        self._service = service
        self._in_actor = contextvars.copy_context().run  # other threads send for this actor

    def message(self, text: str) -> None:
        self.warning(text)

    def warning(self, text: str) -> None:
        self._in_actor(self._service.say.broadcast, f"{self._worker}: {text}")


class GenerateService(AnsweringActor):
    """Spawned in the controller's own process."""

    @concurrent_endpoint
    async def generate(self, key: str, request: EngineRequest, time_left_s: float) -> tuple[Completion, float]:
        """Generate for the group with this key; see `GroupHandler.generate`."""
        return await handler_of(key).generate(request, time_left_s)

    @concurrent_endpoint
    async def say(self, text: str) -> None:
        """Show a line of a worker."""
        for console in _consoles:
            console.warning(text)

    @concurrent_endpoint
    async def finished(self, key: str, rollout: Rollout) -> None:
        await handler_of(key).finished(rollout)


logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 10.0


class WorkerPool:
    """Runs each group in the worker with the fewest rollouts. A group whose worker dies is run again in another.

    Args:
        max_attempts: workers that may die under one group. One whose host goes does not count.
        wait_s: how long a group waits for a worker when there is none.
    """

    def __init__(self, *, max_attempts: int = 3, wait_s: float = 180.0) -> None:
        self._workers: dict[RemoteProcess, Any] = {}  # actors
        self._load: Counter[RemoteProcess] = Counter()  # rollouts
        self._max_attempts = max_attempts
        self._wait_s = wait_s
        self._changed = asyncio.Event()
        self._callbacks = Callbacks()

    def add(self, remote: RemoteProcess, actor: Any) -> None:
        self._workers[remote] = actor
        self._changed.set()

    def remove(self, remote: RemoteProcess) -> None:
        self._workers.pop(remote, None)

    async def retire(self, remote: RemoteProcess, finish_s: float) -> None:
        """Give a worker no further groups, and wait until it has none, or so long."""
        self.remove(remote)
        with suppress(TimeoutError):
            async with asyncio.timeout(finish_s):
                while self._load[remote]:
                    self._changed.clear()
                    await self._changed.wait()

    def of(self, task: str) -> WorkersOfTask:
        """Runner of the groups of a task."""
        return WorkersOfTask(self, task)

    async def run_group(
        self,
        generate: GenerateFn,
        sample: Any,
        *,
        task: str,
        group_id: str,
        group_size: int,
        sampling: SamplingParams,
        on_finished: Callable[[Rollout], None] | None = None,
    ) -> RolloutGroup:
        """Run a group of a task in a worker; see `Rollouter.run_group`. `on_finished` is called once for each rollout,
        even if the group is run again.

        Raises:
            ActorDiedError: `max_attempts` workers died under the group, or none came up in time.
        """
        told: set[tuple[int, str | None]] = set()
        alone = sample_alone(sample)

        def tell(rollout: Rollout) -> None:
            which = rollout.sibling, rollout.seat
            if on_finished is not None and which not in told:
                told.add(which)
                rollout.sample = alone
                with self._callbacks.guarded("on_finished"):
                    on_finished(rollout)

        deaths = 0
        while True:
            remote = await self._least_loaded()
            actor, handler = self._workers[remote], GroupHandler(group_id, generate, tell)
            self._load[remote] += group_size
            try:
                with handling(handler):
                    group = await remote.call(
                        actor.run_group, handler.key, sample, group_id, group_size, sampling, task
                    )
                rollouts = [replace(rollout, sample=alone) for rollout in group.rollouts]
                return replace(group, sample=alone, rollouts=rollouts)
            except ActorDiedError as error:
                self.remove(remote)
                remote.end(str(error))  # then another takes its place
                deaths += not remote.excused
                if deaths == self._max_attempts:
                    raise
                logger.warning("%s; group %s is run again", error, group_id)
            except asyncio.CancelledError:
                with suppress(ActorDiedError):
                    await remote.call(actor.cancel, group_id, timeout_s=CANCEL_TIMEOUT_S)
                raise
            finally:
                self._load[remote] -= group_size
                self._changed.set()
                await handler.close()

    def pause_judging(self, task: str) -> None:
        for worker in self._workers.values():
            worker.pause_judging.broadcast(task)

    def resume_judging(self, task: str) -> None:
        for worker in self._workers.values():
            worker.resume_judging.broadcast(task)

    async def _least_loaded(self) -> RemoteProcess:
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._workers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ActorDiedError(f"no rollout worker came up within {self._wait_s:g} s") from None
        return min(self._workers, key=lambda remote: self._load[remote])


class WorkersOfTask:
    """The `GroupRunner` of one task. Made by `WorkerPool.of`."""

    def __init__(self, pool: WorkerPool, task: str) -> None:
        self._pool = pool
        self._task = task
        self.run_group = partial(pool.run_group, task=task)

    def pause_judging(self) -> None:
        self._pool.pause_judging(self._task)

    def resume_judging(self) -> None:
        self._pool.resume_judging(self._task)
