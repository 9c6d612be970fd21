"""Rollout workers as a `GroupRunner` for each task."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from titan_rl.cluster.generate_service import GroupHandler, handling
from titan_rl.cluster.processes.remote_process import RemoteProcess
from titan_rl.core.errors import ActorDiedError
from titan_rl.rollout.group.callbacks import Callbacks
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.types import GenerateFn, SamplingParams

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
        """What runs the groups of a task, by its name."""
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
        """As `Rollouter.run_group` of a task; `on_finished` is called once for each rollout, however often it is run.

        Raises:
            ActorDiedError: `max_attempts` workers died under the group, or none came up in time.
        """
        told: set[tuple[int, str | None]] = set()

        def tell(rollout: Rollout) -> None:
            which = rollout.sibling, rollout.seat
            if on_finished is not None and which not in told:
                told.add(which)
                rollout.sample = sample
                self._callbacks.call("on_finished", on_finished, rollout)

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
                rollouts = [replace(rollout, sample=sample) for rollout in group.rollouts]
                return replace(group, sample=sample, rollouts=rollouts)
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
