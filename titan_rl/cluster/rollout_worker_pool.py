"""The controller's side of rollout workers: their pool, the groups that they run, and the service that they call."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.processes.actor_calls import AnsweringActor
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.cluster.rollout_worker import ROOM_S, GroupOrder
from titan_rl.core.console import Console
from titan_rl.core.errors import ActorDiedError
from titan_rl.generation.group_requests import GroupRequests
from titan_rl.generation.recording import RecordedAnswer
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.router.shard_control import Ended, FromShard, ToShard
from titan_rl.rollout.group.rollouter import Callbacks
from titan_rl.rollout.group.running_groups import Waits, join_waits
from titan_rl.rollout.types import Rollout, RolloutGroup, sample_alone
from titan_rl.types import GenerateFn, SamplingParams

T = TypeVar("T")

CANCEL_TIMEOUT_S = 10.0
SUSPEND_TIMEOUT_S = 120.0
"""Longest wait for the requests of a group to end, in seconds. A little longer than the limits of the router."""
SEND_TIMEOUT_S = 60.0
"""Longest wait for the answers of a worker before a checkpoint, in seconds. Later answers are recorded after it."""

logger = logging.getLogger(__name__)

_numbers = count()


class RemoteGroup:
    """Group that runs in a worker. Belongs to the event loop that made it.

    Attributes:
        key: Name that the worker uses for this run of the group. Another run of the same group has the same ids but
            another key, because messages of a dead worker may arrive after that run has begun.

    Args:
        on_finished: Called with each rollout, without its turns.
    """

    def __init__(self, group_id: str, requests: GroupRequests, on_finished: Callable[[Rollout], None]) -> None:
        self.key = f"{group_id}#{next(_numbers)}"
        self.requests = requests
        self.on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self._resuming: set[asyncio.Task[None]] = set()

    def order(self, task: str, sample: Any, group_id: str, group_size: int, sampling: SamplingParams) -> GroupOrder:
        requests = self.requests
        if (recorder := requests.recorder) is None:
            return GroupOrder(self.key, task, sample, group_id, group_size, sampling, version=requests.version)
        known = [
            RecordedAnswer(recorder.index, digest, answer.sampling, answer.completion)
            for (_, digest), answer in recorder.known().items()
        ]
        return GroupOrder(self.key, task, sample, group_id, group_size, sampling, recorder.index, tuple(known))

    @property
    def is_suspended(self) -> bool:
        suspension = self.requests.suspension
        return suspension is not None and suspension.is_suspended

    async def wait_resumed(self) -> None:
        """Wait until the group is not suspended. A suspended group is not sent to a worker."""
        if self.requests.suspension is not None:
            await self.requests.suspension.wait_resumed()

    @contextmanager
    def running_in(self, remote: RemoteProcess, actor: Any) -> Generator[None]:
        """Context manager for the run in a worker, which reaches the group by its key. Suspensions are passed on to the
        worker."""
        suspension = self.requests.suspension
        suspend = partial(self._suspend, remote, actor)
        _groups[self.key] = self
        try:
            with nullcontext() if suspension is None else suspension.request(self.key, suspend):
                yield
        finally:
            del _groups[self.key]
            for task in self._resuming:
                task.cancel()

    async def _suspend(self, remote: RemoteProcess, actor: Any, _: object) -> None:
        with suppress(ActorDiedError):  # the group runs again once it is resumed
            await remote.call(actor.suspend, self.key, timeout_s=SUSPEND_TIMEOUT_S)
        resuming = asyncio.ensure_future(self._resume(actor))
        self._resuming.add(resuming)
        resuming.add_done_callback(self._resuming.discard)

    async def _resume(self, actor: Any) -> None:
        while self.is_suspended:  # also if it was resumed and suspended again at once
            await self.wait_resumed()
        actor.resume.broadcast(self.key)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the group's event loop. May be called from any event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


_groups: dict[str, RemoteGroup] = {}  # by key; the service lives in the process that fills it

Answers = Sequence[tuple[str, RecordedAnswer]]
"""Answers, each with the key of its group."""

Ends = Sequence[tuple[str, Rollout]]
"""Rollouts that have ended, each with the key of its group."""

Room = Callable[[], Awaitable[object]]
"""Function that waits until the disk has caught up."""


def record(answers: Answers, finished: Ends) -> Room | None:
    """Record answers and ends of rollouts in the groups with these keys. Drops those of groups that have ended or run
    again in another worker. Called on the groups' event loop.

    Returns:
        Function that waits for the disk; None if nothing was recorded.
    """
    requests = None
    for key, answer in answers:
        if (group := _groups.get(key)) is not None and group.requests.recorder is not None:
            requests = group.requests
            group.requests.recorder.record(answer)
    for key, rollout in finished:
        if (group := _groups.get(key)) is not None:
            group.on_finished(rollout)
    return None if requests is None else requests.room


async def wait_for_room(room: Room | None) -> bool:
    """Wait until the disk has caught up, for `ROOM_S` seconds at most. Returns whether it has."""
    try:
        async with asyncio.timeout(ROOM_S):
            if room is not None:
                await room()
    except TimeoutError:
        return False
    return True


class WorkerLink:
    """The router's connection to the shard of one worker: a `ShardLink`.

    Attributes:
        name: Name of the shard.
        states: Number of the worker's running training groups by state, as it last reported them.
        waits: Its groups that wait for something else than generation, as it last reported them.
    """

    def __init__(self, name: str, remote: RemoteProcess, actor: Any, router: GeneratorRouter) -> None:
        self.name = name
        self.states: Counter[str] = Counter()
        self.waits: Waits = {}
        self._remote = remote
        self._actor = actor
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._noted = 0  # number of the newest message
        self._room: Room | None = None  # waits for the disk after that message

    async def note(self, number: int, answers: Answers, finished: Ends) -> bool:
        """Record answers and ends of rollouts of the worker's groups, unless the message is recorded already. Called on
        the groups' event loop.

        Args:
            number: Number of the message, from 1. A message that is sent again keeps its number.

        Returns:
            Whether the disk has caught up with the message. Otherwise the worker sends it again.
        """
        if number > self._noted:
            self._room = record(answers, finished)
            self._noted = number
        return await wait_for_room(self._room)

    async def call(self, number: int, message: ToShard) -> Ended:
        ended, self.states, self.waits = await self._remote.call(self._actor.send_to_shard, number, message)
        return ended

    def end(self, reason: str) -> None:
        self._remote.end(reason)

    async def send_answers(self) -> None:
        """Have the worker send the tokens so far of its requests in flight."""
        try:
            await self._remote.call(self._actor.send_answers, timeout_s=SEND_TIMEOUT_S)
        except ActorDiedError as error:
            logger.warning("%s; the tokens of its requests in flight are not recorded", error)

    def receive_soon(self, report: FromShard) -> None:
        """Pass a report on to the router. May be called from any event loop."""
        self._loop.call_soon_threadsafe(self._router.receive, self, report)


_links: dict[str, WorkerLink] = {}  # by name

_consoles: list[Console] = []


@contextmanager
def show_worker_lines(console: Console) -> Generator[None]:
    """Context manager: show the lines of workers on this process's console."""
    _consoles.append(console)
    try:
        yield
    finally:
        _consoles.remove(console)


class GroupService(AnsweringActor):
    """Receiver of the workers' messages. It runs in the controller's own process."""

    @concurrent_endpoint
    async def note(self, worker: str, number: int, answers: Answers, finished: Ends) -> bool:
        """Note the progress of a worker's groups; see `WorkerLink.note`. Messages that arrive after the worker's end
        are dropped."""
        known = (group for key, _ in (*answers, *finished) if (group := _groups.get(key)) is not None)
        if (link := _links.get(worker)) is None or (group := next(known, None)) is None:
            return True
        return await group.run(link.note(number, answers, finished))

    @concurrent_endpoint
    async def report(self, worker: str, report: FromShard) -> None:
        """Handle the report of a worker's shard."""
        if (link := _links.get(worker)) is not None:
            link.receive_soon(report)

    @concurrent_endpoint
    async def show_warning(self, text: str) -> None:
        """Show a line of a worker's output."""
        for console in _consoles:
            console.warning(text)


class WorkerPool:
    """Runs each group in the worker with the fewest rollouts. If the worker dies, the group runs again in another one.

    Args:
        max_attempts: Number of workers that may die under one group. Workers whose host is lost do not count. If
            several die at the same time, all may count, even if only one of them ran the group, so a run allows as many
            deaths as workers may be replaced.
        wait_s: Longest time that a group waits for a worker, in seconds.
    """

    def __init__(self, *, max_attempts: int = 3, wait_s: float = 180.0) -> None:
        self._workers: dict[RemoteProcess, Any] = {}  # actors
        self._retiring: set[RemoteProcess] = set()  # workers that get no further groups
        self._links: dict[RemoteProcess, WorkerLink] = {}
        self._waiting: list[tuple[RemoteProcess, Any, str]] = []  # workers that wait for a router
        self._load: Counter[RemoteProcess] = Counter()  # number of rollouts
        self._not_judging: set[str] = set()  # tasks whose judging is paused
        self._router: GeneratorRouter | None = None
        self._max_attempts = max_attempts
        self._wait_s = wait_s
        self._changed = asyncio.Event()
        self._callbacks = Callbacks()

    async def use(self, router: GeneratorRouter) -> None:
        """Give each worker a shard of a router, including workers that start later."""
        self._router = router
        waiting, self._waiting = self._waiting, []
        joining = [self.join(*worker) for worker in waiting]
        for result in await asyncio.gather(*joining, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ActorDiedError):
                raise result  # a worker that died is replaced

    async def join(self, remote: RemoteProcess, actor: Any, shard: str) -> None:
        """Add a worker that has started, and its shard. It gets groups once there is a router.

        Raises:
            ActorDiedError: The worker has ended meanwhile.
        """
        if self._router is None:
            self._waiting.append((remote, actor, shard))
            return
        link = self._links[remote] = _links[shard] = WorkerLink(shard, remote, actor, self._router)
        await self._router.join(link)
        self.add(remote, actor)

    def add(self, remote: RemoteProcess, actor: Any) -> None:
        self._workers[remote] = actor
        for task in self._not_judging:
            actor.pause_judging.broadcast(task)
        self._changed.set()

    def remove(self, remote: RemoteProcess) -> None:
        """Forget a worker that has ended, and its shard. Further calls do nothing."""
        self._workers.pop(remote, None)
        self._retiring.discard(remote)
        if (link := self._links.pop(remote, None)) is not None and self._router is not None:
            _links.pop(link.name, None)
            self._router.leave(link)

    async def retire(self, remote: RemoteProcess, finish_s: float) -> None:
        """Give a worker no further groups, and wait up to `finish_s` seconds until it has none. Does nothing for other
        processes."""
        if remote not in self._workers:
            return
        self._retiring.add(remote)
        with suppress(TimeoutError):
            async with asyncio.timeout(finish_s):
                while self._load[remote]:
                    self._changed.clear()
                    await self._changed.wait()

    def of(self, task: str) -> WorkersOfTask:
        """Runner of the groups of a task."""
        return WorkersOfTask(self, task)

    def states(self) -> Counter[str]:
        """Number of running training groups by state, as the workers last reported them."""
        return sum((link.states for link in self._links.values()), Counter[str]())

    def waits(self) -> Waits:
        """Groups that wait for something else than generation, as the workers last reported them."""
        return join_waits(link.waits for link in self._links.values())

    async def send_answers(self) -> None:
        """Have all workers send the tokens so far of their requests in flight, for the journal. Does not wait longer
        for a worker that does not answer in time: its answers are recorded when they arrive."""
        await asyncio.gather(*(link.send_answers() for link in self._links.values()))

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
        even if the group runs again. At that time the rollout may lack its turns and messages.

        Args:
            generate: Must be a `GroupRequests`, from which the worker makes its own.

        Raises:
            ActorDiedError: `max_attempts` workers died under the group, or no worker was available in time.
        """
        assert isinstance(generate, GroupRequests), "a worker generates through its own shard of the router"
        reported: set[tuple[int, str | None]] = set()
        alone = sample_alone(sample)

        def report(rollout: Rollout) -> None:
            position = rollout.sibling, rollout.seat
            if on_finished is not None and position not in reported:
                reported.add(position)
                rollout.sample = alone
                with self._callbacks.guarded("on_finished"):
                    on_finished(rollout)

        deaths = 0
        while True:
            running = RemoteGroup(group_id, generate, report)
            remote = await self._choose_worker(running)
            actor = self._workers[remote]
            self._load[remote] += group_size
            try:
                with running.running_in(remote, actor):
                    order = running.order(task, sample, group_id, group_size, sampling)
                    group = await self._run(remote, actor, order)
                for rollout in group.rollouts:
                    report(rollout)
                rollouts = [replace(rollout, sample=alone) for rollout in group.rollouts]
                return replace(group, sample=alone, rollouts=rollouts)
            except ActorDiedError as error:
                self.remove(remote)
                remote.end(str(error))  # then another worker replaces it
                deaths += not remote.excused
                if deaths == self._max_attempts:
                    raise
                logger.warning("%s; group %s is run again", error, group_id)
            finally:
                self._load[remote] -= group_size
                self._changed.set()

    async def _run(self, remote: RemoteProcess, actor: Any, order: GroupOrder) -> RolloutGroup:
        try:
            return await remote.call(actor.run_group, order)
        except asyncio.CancelledError:
            with suppress(ActorDiedError):  # its answers are recorded before it ends
                await remote.call(actor.cancel, order.key, timeout_s=CANCEL_TIMEOUT_S)
            raise

    def pause_judging(self, task: str) -> None:
        self._not_judging.add(task)
        for worker in self._workers.values():
            worker.pause_judging.broadcast(task)

    def resume_judging(self, task: str) -> None:
        self._not_judging.discard(task)
        for worker in self._workers.values():
            worker.resume_judging.broadcast(task)

    async def _choose_worker(self, group: RemoteGroup) -> RemoteProcess:
        """Choose a worker for a group as soon as the group may run."""
        while True:
            await group.wait_resumed()
            remote = await self._least_loaded()
            if not group.is_suspended:
                return remote

    async def _least_loaded(self) -> RemoteProcess:
        try:
            async with asyncio.timeout(self._wait_s):
                while not (taking := [remote for remote in self._workers if self._takes(remote)]):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ActorDiedError(f"no rollout worker started within {self._wait_s:g} s") from None
        return min(taking, key=lambda remote: self._load[remote])

    def _takes(self, remote: RemoteProcess) -> bool:
        """Whether a worker gets groups. A worker that has ended may still be listed, because several may die at once. A
        group that is given to such a worker would seem to have killed it."""
        return remote not in self._retiring and remote.reason is None


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
