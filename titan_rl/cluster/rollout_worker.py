"""Process of a rollout worker: it runs groups, and sends their requests to the generators through its own shard of the
router. Environments, parsing and scoring hold Python's global interpreter lock, so each worker has its own process."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import pickle
from collections import Counter
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.actor_replica import router_options
from titan_rl.cluster.processes.actor_calls import ActorHandle
from titan_rl.cluster.processes.process import ProcessActor, ProcessSpec, main_thread_loop
from titan_rl.cluster.processes.remote_process import call
from titan_rl.cluster.request_stream import GeneratorStreams, caller_of
from titan_rl.core.calls.retries import Backoff
from titan_rl.core.calls.threads import UsersThreads
from titan_rl.core.calls.user_code import summary
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.core.console import Console
from titan_rl.core.errors import ActorDiedError
from titan_rl.generation.group_requests import GroupRequests
from titan_rl.generation.recording import KnownAnswers, RecordedAnswer, Recorder
from titan_rl.generation.router.shard import ReplicaConnection, RouterShard
from titan_rl.generation.router.shard_control import Ended, FromShard, ToShard
from titan_rl.generation.router.strategies import make_strategy
from titan_rl.rollout.checked_copies import completion_of, portable
from titan_rl.rollout.group.running_groups import RunningGroup, RunningGroups, Waits, join_waits
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.scheduling.lease import Suspension
from titan_rl.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutWorkerSettings:
    """Settings of a worker process, which imports the tasks named in the resolved settings.

    Attributes:
        config_path, model_path: Paths on the worker's host.
        shard: Name of the worker's shard of the router. No other process has ever had it.
        strategy: Pickled strategy of the router, if it is not the one in the settings.
    """

    config_path: Path
    model_path: Path
    shard: str
    strategy: bytes | None = None


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """Order to run one group.

    Attributes:
        key: Unique name of this run of the group.
        sample: Sample of the task, or a `Matched` with one.
        index: Position in the training data; None for a validation group.
        known: Answers that the group received before, if it runs again.
        version: Version that the group's requests name; see `GroupRequests`.
    """

    key: str
    task: str
    sample: Any
    group_id: str
    group_size: int
    sampling: SamplingParams
    index: int | None = None
    known: tuple[RecordedAnswer, ...] = ()
    version: int | None = None


logger = logging.getLogger(__name__)

SEND_EVERY_S = 0.1
"""Minimum time between two messages with answers, in seconds. Answers recorded in between are lost if the process
dies."""

ROOM_S = 20.0
"""Longest time that the controller waits for its disk before it answers a message, in seconds."""

MOST_UNSENT = 1 << 20
"""Maximum number of tokens that wait for the controller's disk. While there are more, no request is made."""

RETRY_S = 0.25
LONGEST_RETRY_S = 4.0
"""First and longest pause before a message is sent again, in seconds."""

GIVE_UP_S = 30.0
"""Time after which repeated failures to send a message are final, in seconds."""

ANSWER_S = ROOM_S + 10.0
"""Longest wait for the answer to a message, in seconds. A controller that waits for its disk says so after `ROOM_S`,
and the message is then sent again until the disk has caught up."""


class ProgressSender:
    """Sends answers and the ends of rollouts to the controller's journal, one message at a time. They are collected
    because a message costs more than its content.

    A message that fails is sent again under the same number, so the controller recognizes a message that it has already
    received. After `GIVE_UP_S` of failures the sender has failed permanently, and so has the worker: its process is
    replaced, and its groups run again elsewhere.

    Args:
        service: The controller's `GroupService`.
        worker: Unique name of this process for the service.
    """

    def __init__(self, service: Any, worker: str) -> None:
        self._service = service
        self._worker = worker
        self._number = 0  # of the last message
        self._answers: list[tuple[str, RecordedAnswer]] = []
        self._finished: list[tuple[str, Rollout]] = []
        self._num_tokens = 0
        self._sent = asyncio.Event()  # set unless too many tokens wait
        self._sent.set()
        self._sending: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # messages are sent one after another
        self._failure: ActorDiedError | None = None

    def add_answer(self, key: str, answer: RecordedAnswer) -> None:
        """Send an answer of a group soon.

        Args:
            key: Key of the group.
        """
        self._answers.append((key, answer))
        self._num_tokens += len(answer.completion.token_ids)
        if self._num_tokens > MOST_UNSENT and self._failure is None:
            self._sent.clear()
        self._send_soon()

    def add_finished(self, key: str, rollout: Rollout) -> None:
        """Send the end of a group's rollout soon, without its tokens."""
        self._finished.append((key, replace(portable(rollout), turns=[], messages=[])))
        self._send_soon()

    def drop(self, key: str) -> None:
        """Drop the unsent answers of a group that has finished, because the finished group contains them."""
        dropped = [entry for entry in self._answers if entry[0] == key]
        self._answers = [entry for entry in self._answers if entry[0] != key]
        self._finished = [entry for entry in self._finished if entry[0] != key]
        self._make_room(dropped)

    def check(self) -> None:
        """Check that the sender works.

        Raises:
            ActorDiedError: The sender has failed permanently, so this process must be replaced.
        """
        if self._failure is not None:
            raise self._failure

    async def room(self) -> None:
        """Wait until the controller keeps up.

        Raises:
            ActorDiedError: See `check`.
        """
        await self._sent.wait()
        self.check()

    async def flush(self) -> None:
        """Wait until the controller has all answers so far. Takes at most two messages, even if more answers come.

        Raises:
            ActorDiedError: See `check`.
        """
        await asyncio.shield(self._send_all())
        self.check()

    def _send_soon(self) -> None:
        if self._sending is None and self._failure is None:
            self._sending = asyncio.ensure_future(self._keep_sending())

    async def _keep_sending(self) -> None:
        try:
            while (self._answers or self._finished) and self._failure is None:
                await self._send_all()
                if self._answers or self._finished:
                    await asyncio.sleep(SEND_EVERY_S)
        finally:
            self._sending = None

    async def _send_all(self) -> None:
        """Send everything that is unsent, after a message that is in flight."""
        async with self._turn:
            answers, self._answers = self._answers, []
            finished, self._finished = self._finished, []
            if not (answers or finished) or self._failure is not None:
                return
            self._number += 1
            await self._send(self._number, answers, finished)
            self._make_room(answers)

    async def _send(
        self, number: int, answers: list[tuple[str, RecordedAnswer]], finished: list[tuple[str, Rollout]]
    ) -> None:
        backoff = Backoff(RETRY_S, LONGEST_RETRY_S, limit_s=GIVE_UP_S)
        message = (self._worker, number, answers, finished)
        while True:
            try:
                if await call(self._service.note, *message, who="controller", timeout_s=ANSWER_S):
                    return
                backoff = Backoff(RETRY_S, LONGEST_RETRY_S, limit_s=GIVE_UP_S)  # it has arrived
                continue
            except Exception as error:
                if backoff.is_over:
                    logger.exception("message %d cannot be sent to the journal", number)
                    self._fail(error)
                    return
                logger.warning("message %d to the journal is sent again: %r", number, error)
            await backoff.pause()

    def _fail(self, error: Exception) -> None:
        """Fail everything that waits for the controller, because the process is useless from now on."""
        self._failure = ActorDiedError(
            f"its answers could not be sent to the controller's journal for {GIVE_UP_S:g} s: {summary(error)}"
        )
        self._failure.__cause__ = error
        self._sent.set()

    def _make_room(self, answers: Sequence[tuple[str, RecordedAnswer]]) -> None:
        """Note that these answers no longer wait."""
        self._num_tokens -= sum(len(answer.completion.token_ids) for _, answer in answers)
        if self._num_tokens <= MOST_UNSENT:
            self._sent.set()


CANCEL_S = 1.0
"""Longest wait for the requests of a cancelled group to end, in seconds."""


class _Group:
    """Group that runs in this process, with its requests."""

    def __init__(
        self, order: GroupOrder, shard: RouterShard, playing: RunningGroup, sender: ProgressSender, max_context: int
    ) -> None:
        self.playing = playing
        self.suspension = Suspension()
        self.recorder: Recorder | None = None
        self._key = order.key
        self._sender = sender
        self._known: dict[tuple[str, bytes], RecordedAnswer] = {}
        for answer in order.known:
            self._know(answer)
        if order.index is None:
            self.requests = GroupRequests(shard, playing, version=order.version)
        else:
            self.recorder = Recorder(order.index, self._answers, self._record, completion_of)
            self.requests = GroupRequests(
                shard,
                playing,
                recorder=self.recorder,
                suspension=self.suspension,
                room=sender.room,
                max_context=max_context,
            )

    def _answers(self) -> KnownAnswers:
        return self._known

    def _know(self, answer: RecordedAnswer) -> None:
        self._known[answer.completion.request_id, answer.prompt_digest] = answer

    def _record(self, answer: RecordedAnswer) -> None:
        self._know(answer)
        self._sender.add_answer(self._key, answer)


class RolloutWorkerActor(ProcessActor):
    """Runs a `Rollouter` for each task over a shard of the run's router, in the main thread, where user code may use
    signals and can be interrupted.

    Args:
        service: The controller's `GroupService`.
    """

    def __init__(self, spec: ProcessSpec, settings: RolloutWorkerSettings, service: Any) -> None:
        super().__init__(spec)
        self._main = main_thread_loop()
        self._settings = settings
        self._service = ActorHandle(service)
        self._numbers = count()  # of the streams to generators
        self._groups: dict[str, _Group] = {}  # by key, like the tasks
        self._tasks: dict[str, asyncio.Task[RolloutGroup]] = {}

    async def perform(self, endpoint: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(endpoint, self._main))

    @concurrent_endpoint
    async def start(self) -> None:
        """Open the tasks.

        Raises:
            ConfigError: A task cannot be imported here.
        """
        from titan_rl.config.build import open_rollouters
        from titan_rl.config.load import load_config

        asyncio.get_running_loop().set_default_executor(UsersThreads())  # the process ends without waiting for threads
        console = _ControllerConsole(self._spec.name, self._service)
        config_path = self._settings.config_path
        config = load_config(config_path, [("model.path", str(self._settings.model_path))], check_files=False)
        given = self._settings.strategy
        self._shard = RouterShard(
            self._connect,
            self._report,
            make_strategy(config.routing.strategy) if given is None else pickle.loads(given),
            origin=f"@{self._settings.shard}",
            **router_options(config.generation, config.routing, config.statedict, config.hosts.wait_s),
        )
        self._sender = ProgressSender(self._service, self._settings.shard)
        self._max_context = config.model.max_context
        self._training = {source.name: RunningGroups(self._shard.finish_session) for source in config.sources}
        self._held_out = RunningGroups(self._shard.finish_session)
        # Both stay open for the lifetime of the process.
        self._opened = open_rollouters(config, config_path.parent, console)
        self._rollouters = await self._opened.__aenter__()
        self._watchdog = LoopWatchdog(console)
        self._watchdog.__enter__()  # after the imports, which block the loop

    @concurrent_endpoint
    async def send_to_shard(self, number: int, message: ToShard) -> tuple[Ended, Counter[str], Waits]:
        """Have the shard carry out a message of the router; see `RouterShard.receive_message`.

        Returns:
            The shard's answer, the number of running training groups by state, and the groups that wait for something
            else than generation.

        Raises:
            ActorDiedError: The controller's journal cannot be reached, so this process must be replaced.
        """
        self._sender.check()
        ended = await self._shard.receive_message(number, message)
        waits = join_waits(groups.waits() for groups in (*self._training.values(), self._held_out))
        return ended, sum((groups.states() for groups in self._training.values()), Counter[str]()), waits

    @concurrent_endpoint
    async def run_group(self, order: GroupOrder) -> RolloutGroup:
        """Run a group; see `Rollouter.run_group`. Returns plain data without the sample, because environments may keep
        objects in messages and samples that cannot be pickled.

        Raises:
            ActorDiedError: See `send_to_shard`.
        """
        groups = self._held_out if order.index is None else self._training[order.task]
        with groups.one(order.group_size) as playing, self._running(order, playing) as group:

            def on_finished(rollout: Rollout) -> None:
                playing.ended(rollout.rollout_id)
                self._sender.add_finished(order.key, rollout)

            running = self._tasks[order.key] = asyncio.ensure_future(
                self._rollouters[order.task].run_group(
                    group.requests,
                    order.sample,
                    group_id=order.group_id,
                    group_size=order.group_size,
                    sampling=order.sampling,
                    on_finished=on_finished,
                )
            )
            try:
                finished = await running
            except Exception:
                self._sender.check()  # raises if the journal was the cause
                raise
            self._sender.check()  # otherwise requests may have failed because the journal was unreachable
            self._sender.drop(order.key)
            return replace(finished, sample=None, rollouts=[portable(rollout) for rollout in finished.rollouts])

    @contextmanager
    def _running(self, order: GroupOrder, playing: RunningGroup) -> Generator[_Group]:
        group = self._groups[order.key] = _Group(order, self._shard, playing, self._sender, self._max_context)
        try:
            yield group
        finally:
            del self._groups[order.key]
            self._tasks.pop(order.key, None)

    @concurrent_endpoint
    async def cancel(self, key: str) -> None:
        """Close the environments of a group, and send its answers. Does nothing for a group that has ended."""
        if (task := self._tasks.get(key)) is None:
            return
        group = self._groups[key]
        task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await group.playing.idle.wait()
        await self._sender.flush()

    @concurrent_endpoint
    async def suspend(self, key: str) -> None:
        """Hold back new requests of a group, and end those in flight with the tokens generated so far. Does nothing for
        a group that has ended."""
        if (group := self._groups.get(key)) is not None:
            group.suspension.suspend()
            await group.suspension.abort_in_flight()

    @concurrent_endpoint
    async def resume(self, key: str) -> None:
        if (group := self._groups.get(key)) is not None:
            self._main.call_soon_threadsafe(group.suspension.resume)

    @concurrent_endpoint
    async def send_answers(self) -> None:
        """Send the controller all answers, and the tokens so far of requests in flight."""
        tokens = self._shard.tokens_so_far()
        for group in list(self._groups.values()):
            if group.recorder is not None:
                group.recorder.record_partial(tokens)
        await self._sender.flush()

    @concurrent_endpoint
    async def pause_judging(self, task: str) -> None:
        self._main.call_soon_threadsafe(self._rollouters[task].pause_judging)

    @concurrent_endpoint
    async def resume_judging(self, task: str) -> None:
        self._main.call_soon_threadsafe(self._rollouters[task].resume_judging)

    def _connect(self, name: str, actor: Any) -> ReplicaConnection:
        return ReplicaConnection(name, GeneratorStreams(name, actor, self._next_caller))

    def _next_caller(self) -> str:
        return caller_of(self._settings.shard, next(self._numbers))

    def _report(self, report: FromShard) -> None:
        self._service.report.broadcast(self._settings.shard, report)


class _ControllerConsole(Console):
    """Console of a worker. The controller's console shows its lines."""

    def __init__(self, worker: str, service: Any) -> None:
        self._worker = worker
        self._service = service
        self._in_actor = contextvars.copy_context().run  # lets other threads send in the context of this actor

    def message(self, text: str) -> None:
        self.warning(text)

    def warning(self, text: str) -> None:
        self._in_actor(self._service.show_warning.broadcast, f"{self._worker}: {text}")
