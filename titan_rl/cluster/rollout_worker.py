"""A process that runs groups: environments, parsing and scoring hold Python's lock, and each process has its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from monarch.actor import concurrent_endpoint

from titan_rl.cluster.processes.answers import ActorHandle
from titan_rl.cluster.processes.process import ProcessActor, ProcessSpec
from titan_rl.cluster.processes.remote_process import call
from titan_rl.core.calls import stopwatch
from titan_rl.core.calls.threads import UsersThreads
from titan_rl.core.calls.watchdog import LoopWatchdog
from titan_rl.generation.request import EngineRequest
from titan_rl.rollout.copies import portable
from titan_rl.rollout.types import Rollout, RolloutGroup
from titan_rl.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutWorkerSettings:
    """Everything a worker process needs. The task is imported there, from its name in the resolved settings."""

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
        """Returns once the tasks are open.

        Raises:
            ConfigError: a task cannot be imported here.
        """
        from titan_rl.config.load import load_config
        from titan_rl.config.make_rollouter import open_rollouters

        asyncio.get_running_loop().set_default_executor(UsersThreads())  # the process ends without what hangs there
        in_actor = contextvars.copy_context().run  # the watching thread sends for this actor
        name = self._spec.name

        def tell(text: str) -> None:
            in_actor(self._service.say.broadcast, f"{name}: {text}")

        config_path = self._settings.config_path
        config = load_config(config_path, [("model.path", str(self._settings.model_path))], check_files=False)
        # Both for as long as the process lives.
        self._opened = open_rollouters(config, config_path.parent, tell)
        self._rollouters = await self._opened.__aenter__()
        self._watchdog = LoopWatchdog(tell)
        self._watchdog.__enter__()  # after the imports

    @concurrent_endpoint
    async def run_group(
        self, handler: str, sample: Any, group_id: str, group_size: int, sampling: SamplingParams, task: str
    ) -> RolloutGroup:
        """As `Rollouter.run_group` of the named task, asking the controller's handler of that key. What goes back is
        plain data, without the sample, which is there already: environments may keep in messages and samples what does
        not pickle."""
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
