"""A run in virtual time: the real router, rollouter and scheduler, over engines and a trainer that only take time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from titan_rl.core.errors import ConfigError, MissingExtraError
from titan_rl.generation.places import AdaptivePlaces
from titan_rl.generation.resume import resume_on_abort
from titan_rl.generation.router import GeneratorRouter, Limits, Strategy
from titan_rl.rollout.environment.types import TokenObservation, TokenStep
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.scheduling.batches import GroupBatch
from titan_rl.scheduling.lease import Lease, lengths
from titan_rl.scheduling.scheduler import GroupScheduler
from titan_rl.scheduling.settings import SchedulingConfig
from titan_rl.testing.simulate.cluster import UNLIMITED, Cluster
from titan_rl.testing.simulate.lent_engines import LentEngines
from titan_rl.testing.simulate.simulated_replica import SimulatedReplica
from titan_rl.testing.simulate.tokens import some_tokens
from titan_rl.testing.simulate.workload import Workload
from titan_rl.types import Completion, SamplingParams

FOREVER_S = 1e8  # limits are for faults, which a simulation has none of


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a schedule comes to. Steps of the warm-up are left out."""

    step_s: Sequence[float]  # [num_steps], from batch to batch
    ages: Counter[int]  # versions between a group's oldest token and its step -> groups
    trainer_idle: float  # share of the time
    generators_idle: float  # share of the engines' time, of lent ones that in which they are out
    wasted_tokens: int
    preemptions: int
    moved: int  # requests, from one engine to another, the warm-up's included
    accepted_lengths: Sequence[int]  # of every rollout that was trained on
    offered_lengths: Sequence[int]  # of every rollout of the groups that were admitted

    @property
    def mean_step_s(self) -> float:
        return fmean(self.step_s)

    @property
    def length_bias(self) -> float:
        """Mean length trained on relative to the mean length on offer; 1 is unbiased."""
        return fmean(self.accepted_lengths) / fmean(self.offered_lengths)


def simulate(
    workload: Workload,
    cluster: Cluster,
    scheduling: SchedulingConfig,
    *,
    num_steps: int,
    warmup: int = 0,
    strategy: Strategy | None = None,
) -> SimulationResult:
    """Run `warmup + num_steps` optimizer steps in virtual time.

    Args:
        strategy: of the router, by default the router's own.

    Raises:
        ConfigError: the cluster is colocated, and generation would go on while the trainer works; there are no steps;
            or an answer does not fit into the KV cache of an engine.
    """
    for name, value, least in (("num_steps", num_steps, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ConfigError(f"{name} is {value!r}; it must be at least {least}")
    may_run_on = scheduling.max_staleness or scheduling.num_oversampled
    if cluster.colocated and may_run_on and scheduling.on_batch_ready == "continue":
        raise ConfigError(
            'scheduling.on_batch_ready = "continue" generates while a batch is trained, which a colocated cluster '
            'cannot; use "sleep", "keep" or "abort", or scheduling.max_staleness = 0 without oversampling'
        )
    _check_fit(workload, cluster, (warmup + num_steps) * scheduling.groups_per_step)
    loop = _virtual_time()
    try:
        return loop.run_until_complete(_Simulation(workload, cluster, scheduling, strategy).run(num_steps, warmup))
    finally:
        loop.close()


def _check_fit(workload: Workload, cluster: Cluster, num_groups: int) -> None:
    """Of the groups that are trained on at least, since how many more there are is known in the end only."""
    if cluster.kv_tokens == UNLIMITED:
        return
    answers = ((group, sibling) for group in range(num_groups) for sibling in range(workload.group_size))
    longest = workload.prompt_tokens + max(workload.length(*answer) for answer in answers)
    if longest > cluster.kv_tokens:
        raise ConfigError(
            f"Cluster.kv_tokens is {cluster.kv_tokens}, and the longest request has {longest} tokens; set it to that "
            "at least, or shorten prompts and answers"
        )


def _virtual_time() -> asyncio.AbstractEventLoop:
    try:
        import looptime
    except ImportError:
        raise MissingExtraError("looptime", "simulate") from None
    return looptime.new_event_loop()


class _OneTurnEnv:
    """The environment of one prompt and one answer."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    async def reset(self) -> TokenObservation:
        return TokenObservation(some_tokens(self._prompt_tokens))

    async def step(self, completion: Completion) -> TokenStep:
        return TokenStep(status=RolloutStatus.COMPLETED)

    async def close(self) -> None: ...


class _Simulation:
    def __init__(
        self, workload: Workload, cluster: Cluster, scheduling: SchedulingConfig, strategy: Strategy | None
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        self._scheduling = scheduling
        self._strategy = strategy
        self._replicas = [self._engine(f"generator-{index}") for index in range(cluster.num_replicas)]
        self._lent = [self._engine(f"lent-{index}") for index in range(cluster.num_lent)]

    def _engine(self, name: str) -> SimulatedReplica:
        cluster = self._cluster
        return SimulatedReplica(
            name,
            self._tokens_left,
            cluster.cost,
            max_running=cluster.max_running,
            kv_tokens=cluster.kv_tokens,
            places=AdaptivePlaces(cluster.max_running, cluster.kv_tokens) if cluster.adapts else None,
            wake_s=cluster.wake_s,
        )

    async def run(self, num_steps: int, warmup: int) -> SimulationResult:
        limits = Limits(pull_s=FOREVER_S, abort_s=FOREVER_S, call_s=FOREVER_S, paused_s=FOREVER_S)
        self._router = GeneratorRouter(
            self._replicas,
            self._strategy,
            stall_timeout_s=FOREVER_S,
            limits=limits,
            move_below=self._cluster.move_below,
        )
        self._trainers = LentEngines(self._router, self._lent, self._cluster.wake_s)
        self._rollouter = Rollouter(
            lambda sample: _OneTurnEnv(self._workload.prompt_tokens),
            Rubric([Reward(_first_sibling, name="first")]),
            max_context=self._workload.prompt_tokens + (1 << 40),
            limits=RolloutConfig(rollout_timeout_s=FOREVER_S, generate_timeout_s=FOREVER_S),
            seed=None,  # requests with seeds stay where they are
        )
        self._scheduler = GroupScheduler(
            self._run_group,
            self._scheduling,
            group_size=self._workload.group_size,
            budget=1 << 40,
        )
        async with asyncio.TaskGroup() as background:
            tasks = [background.create_task(replica.run()) for replica in [*self._replicas, *self._lent]]
            await self._router.pull_state_dict(0)
            async with self._scheduler:
                result = await self._train(num_steps, warmup, background)
            await self._router.close()
            for task in tasks:
                task.cancel()
        return result

    async def _train(self, num_steps: int, warmup: int, background: asyncio.TaskGroup) -> SimulationResult:
        """As the controller does: the next step begins while the generators pull, if it has its groups."""
        loop = asyncio.get_running_loop()
        groups: list[RolloutGroup] = []
        step_s, waited_s, wasted = list[float](), 0.0, 0.0
        ages: Counter[int] = Counter()
        began = busy = had = 0.0
        preempted = 0
        pulling: asyncio.Task[None] | None = None
        for version in range(1, 1 + warmup + num_steps):  # that the simulated trainer makes
            if version == 1 + warmup:
                began, busy, preempted = loop.time(), self._busy_s(), self._num_preemptions()
                had = self._engine_s()
                for warm in (groups, step_s, ages):
                    warm.clear()
                waited_s = wasted = 0.0
            started = loop.time()
            async with self._trainers.out():
                batch = await self._scheduler.next_batch()
            waited_s += loop.time() - started
            mode = self._scheduling.on_batch_ready
            if mode != "continue":
                await self._router.pause(mode)
            await asyncio.sleep(self._cluster.logprob_s + self._cluster.train_s)
            batch.trained(version)
            if pulling is not None:
                await pulling
            pulling = background.create_task(self._pull(version, batch))
            if mode != "continue":
                await pulling
                await self._router.resume()
            step_s.append(loop.time() - started)
            groups += batch.groups
            wasted += batch.metrics["wasted_tokens"]
            ages.update(batch.version - min(group.versions) for group in batch.groups)
        if pulling is not None:
            await pulling
        total = loop.time() - began
        offered = range(self._scheduler.next_index)
        return SimulationResult(
            step_s=step_s,
            ages=ages,
            trainer_idle=waited_s / total,
            generators_idle=1 - (self._busy_s() - busy) / (self._engine_s() - had),
            wasted_tokens=round(wasted),
            preemptions=self._num_preemptions() - preempted,
            moved=self._router.num_moved or 0,
            accepted_lengths=[length for group in groups for length in lengths(group)],
            offered_lengths=[self._workload.length(i, s) for i in offered for s in range(self._workload.group_size)],
        )

    async def _pull(self, version: int, batch: GroupBatch) -> None:
        await self._router.pull_state_dict(version)
        batch.release()

    async def _run_group(self, lease: Lease) -> RolloutGroup:
        async def both_open() -> None:
            await lease.suspension.wait_resumed()
            await self._router.wait_resumed()

        generate = resume_on_abort(
            lease.suspension.guard(self._router.generate, self._router.abort),
            wait_until_resumed=both_open,
            resume_timeout_s=FOREVER_S,
            max_attempts=1 << 20,
        )
        return await self._rollouter.run_group(
            generate,
            None,
            group_id=str(lease.index),
            group_size=self._workload.group_size,
            sampling=SamplingParams(max_tokens=1 << 40),
            on_finished=lease.rollout_finished,
        )

    def _tokens_left(self, request_id: str, context: int) -> int:
        index, sibling, _ = request_id.split("/")
        return self._workload.length(int(index), int(sibling)) + self._workload.prompt_tokens - context

    def _busy_s(self) -> float:
        return sum(replica.busy_s for replica in [*self._replicas, *self._lent])

    def _engine_s(self) -> float:
        """Time that the engines had until now."""
        return asyncio.get_running_loop().time() * len(self._replicas) + self._trainers.lent_s

    def _num_preemptions(self) -> int:
        return sum(replica.num_preemptions for replica in [*self._replicas, *self._lent])


def _first_sibling(rollout: Rollout) -> float:
    return float(rollout.sibling == 0)
