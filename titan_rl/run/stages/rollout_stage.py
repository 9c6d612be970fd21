"""Groups of a run, which play the samples of its tasks: training groups and held-out groups."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titan_rl.config.run import RunConfig
from titan_rl.config.tasks import ResolvedSuite
from titan_rl.generation.group_requests import GroupRequests
from titan_rl.generation.router.router import GeneratorRouter
from titan_rl.generation.types import PauseMode
from titan_rl.rollout.group.rollouter import GroupRunner
from titan_rl.rollout.group.running_groups import (
    ENVIRONMENTS,
    REWARDS,
    RunningGroup,
    RunningGroups,
    Waits,
    join_waits,
)
from titan_rl.rollout.task import calling, held_out_samples
from titan_rl.rollout.types import Matched, Rollout, RolloutGroup
from titan_rl.run.journal.run_journal import RunJournal
from titan_rl.run.journal.state import RunState, train_group_id
from titan_rl.run.observability.rollout_log import RolloutLog
from titan_rl.run.stages.league import curriculum_of
from titan_rl.scheduling.backlog import SchedulerObserver
from titan_rl.scheduling.filters import GroupFilter
from titan_rl.scheduling.lease import Lease
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.task_mix import TaskMix, WeightedTask
from titan_rl.tasks.league import split_number
from titan_rl.training.teacher import Teacher
from titan_rl.types import SamplingParams

if TYPE_CHECKING:
    from titan_rl.cluster.rollout_worker_pool import WorkerPool


def make_mix(config: RunConfig, journal: RunJournal, start: RunState) -> TaskMix:
    """Build the task mix with the weights and curricula of the config, and restore its state from the checkpoint and
    the journal. The journal records the mix's further events."""
    return TaskMix(
        {source.name: WeightedTask(source.weight, curriculum_of(source, config.seed)) for source in config.tasks},
        journal,
        state=start.tasks,
        events=[event for event in journal.events if not start.position.is_settled(event.index)],
        is_dropped=journal.state.is_settled,
    )


class RolloutStage:
    """Runner of groups on the samples of tasks, with generation by the router.

    Args:
        group_runners: Runners of groups, by the tasks' names.
        transcripts: Log of each rollout as it ends, before it is scored, and of each group whose reward failed.
        teachers: Teachers that score finished training groups, by the tasks' names.
        workers: Rollout workers that run the groups, each with a shard of the router. By default, groups run in this
            process.
    """

    def __init__(
        self,
        config: RunConfig,
        mix: TaskMix,
        *,
        group_runners: Mapping[str, GroupRunner],
        router: GeneratorRouter,
        journal: RunJournal,
        stop_token_ids: Sequence[int],
        transcripts: RolloutLog,
        teachers: Mapping[str, Teacher] | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        self._config = config
        self._workers = workers
        self._teachers = teachers or {}
        self._mix = mix
        self._sources = {source.name: source for source in config.sources}
        self._group_runners = group_runners
        self._router = router
        self._journal = journal
        self._stop_token_ids = tuple(stop_token_ids)
        self._transcripts = transcripts
        self.held_out = RunningGroups(self._finish_session)
        self._training = RunningGroups(self._finish_session)

    def states(self) -> Counter[str]:
        """Number of running training groups by state."""
        return self._training.states() if self._workers is None else self._workers.states()

    def waits(self) -> Waits:
        """Groups that wait for something else than generation, in training and validation."""
        own = join_waits([self._training.waits(), self.held_out.waits()])
        if self._workers is None:
            return own
        teachers = {part: wait for part, wait in own.items() if part not in (ENVIRONMENTS, REWARDS)}
        return join_waits([teachers, self._workers.waits()])

    def _finish_session(self, session_id: str) -> None:
        self._router.finish_session(session_id)

    async def send_answers(self) -> None:
        """Have rollout workers send all answers to the journal, including partial ones."""
        if self._workers is not None:
            await self._workers.send_answers()

    def make_scheduler(
        self, filters: Sequence[GroupFilter], observer: SchedulerObserver, version: int
    ) -> GroupScheduler:
        """Build the scheduler of the training groups from the step after `version` to the run's last step."""
        config = self._config
        return GroupScheduler(
            self.run_training_group,
            config.scheduling,
            group_size=config.rollout.group_size,
            budget=(config.training.steps - version) * config.scheduling.groups_per_step,
            filters=filters,
            version=version,
            backlog=self._journal.backlog(self),
            observer=observer,
            order=self._mix if len(config.tasks) > 1 else None,
        )

    def train_sample(self, task: str, number: int) -> Any:
        """Create a training sample of a task, without its opponent."""
        seed, number = self._config.seed, split_number(number)[0]
        with calling(f"train_sample({seed}, {number})"):
            return self._sources[task].task.train_sample(seed, number)

    def validation_samples(self, suite: ResolvedSuite) -> list[Any]:
        """Create the held-out samples of a suite, which are the same each time."""
        return held_out_samples(suite.source.task, suite.num_prompts)

    async def run_training_group(self, lease: Lease) -> RolloutGroup:
        """Run the group of a scheduler's lease."""
        config, played = self._config, self._mix.assignment(lease.index)
        sample, opponent = self.train_sample(played.task, played.sample), split_number(played.sample)[1]
        sampling = config.sampling_of(self._sources[played.task])
        with self._training.one(config.rollout.group_size) as playing:
            requests = GroupRequests(
                self._router,
                playing,
                recorder=self._journal.recorder(lease.index),
                suspension=lease.suspension,
                room=self._journal.room,
                max_context=config.model.max_context,
            )
            group = await self._run_group(
                played.task,
                sample if opponent is None else Matched(sample, opponent),
                requests,
                playing,
                lease,
                group_id=train_group_id(lease.index),
                group_size=config.rollout.group_size,
                sampling=SamplingParams(
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    stop_token_ids=self._stop_token_ids,
                    return_routed_experts=config.generation.return_routed_experts,
                ),
            )
            if (teacher := self._teachers.get(played.task)) is not None:
                playing.scored_by(f"the teacher {teacher.name}")
                await teacher.score(group)
        return group

    async def run_validation_group(
        self, suite: ResolvedSuite, group_id: str, sample: Any, named_version: int | None = None
    ) -> RolloutGroup:
        """Run the group of a held-out sample. The seeds are the same each time, so that two validations differ only in
        the weights.

        Args:
            named_version: Version that the requests name, if generators load later ones meanwhile.
        """
        with self.held_out.one(suite.samples_per_prompt) as playing:
            return await self._run_group(
                suite.source.name,
                sample,
                GroupRequests(self._router, playing, version=named_version),
                playing,
                group_id=group_id,
                group_size=suite.samples_per_prompt,
                sampling=SamplingParams(
                    max_tokens=self._config.sampling_of(suite.source).max_tokens,
                    temperature=suite.temperature,
                    seed=self._config.seed,
                    stop_token_ids=self._stop_token_ids,
                ),
            )

    @contextlib.asynccontextmanager
    async def paused(self, mode: PauseMode | str) -> AsyncGenerator[bool]:
        """Pause rollouts in flight during the block, or abort them; see `GeneratorRouter.pause`.

        Args:
            mode: Value of `scheduling.on_batch_ready`. With "continue", rollouts are not paused.

        Yields:
            Whether generation is paused.
        """
        if mode == "continue":
            yield False
            return
        await self._router.pause(mode)
        try:
            for runner in self._group_runners.values():
                runner.pause_judging()
            yield True
        finally:
            for runner in self._group_runners.values():
                runner.resume_judging()
            await self._router.resume()

    async def _run_group(
        self,
        task: str,
        sample: Any,
        requests: GroupRequests,
        playing: RunningGroup,
        lease: Lease | None = None,
        *,
        group_id: str,
        group_size: int,
        sampling: SamplingParams,
    ) -> RolloutGroup:
        def finish(rollout: Rollout) -> None:
            playing.ended(rollout.rollout_id)
            if lease is not None:
                lease.rollout_finished(rollout)
            self._transcripts.ended(rollout)

        group = await self._group_runners[task].run_group(
            requests, sample, group_id=group_id, group_size=group_size, sampling=sampling, on_finished=finish
        )
        group.task = task
        if group.failure is not None:
            self._transcripts.lost(group)
        return group
