"""Training run in virtual time: real router, rollouter and scheduler, simulated engines and trainer."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import fmean

import looptime

from benchmarks.simulated_replica import SimulatedReplica, some_tokens
from titan_rl.core.errors import ConfigError
from titan_rl.generation.adaptive_batch import AdaptiveLimit
from titan_rl.generation.continuation import resume_on_abort
from titan_rl.generation.router import GeneratorRouter, Limits, Strategy
from titan_rl.generation.scripted_engine import CostModel
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
from titan_rl.types import Completion, SamplingParams

UNLIMITED = 1 << 40  # tokens; more than any simulation has


@dataclass(frozen=True, slots=True)
class Cluster:
    """Simulated generators and trainer. All times are in seconds.

    Args:
        num_replicas: Number of engines. Each has its own batch.
        cost: Duration of an engine step, as a function of its running requests, their tokens and new prompt tokens. Its
            `load` is the duration of a pull by an engine.
        max_running: Maximum number of requests that one engine advances at a time.
        kv_tokens: Number of tokens that fit the KV cache of one engine.
        move_below: Generators whose share of the busiest generator's requests is at most this take over some of them;
            see `Moves`.
        num_lent: Number of engines on the trainer's devices, which generate while it waits for a batch; see
            `LentEngines`.
        adapts: Whether to run fewer requests if the KV cache is expected to fill up; see `AdaptiveLimit`.
        train_s: Duration of an optimizer step on one batch.
        logprob_s: Duration of recomputing the logprobs of one batch before training on it; 0 to use the sampler's
            logprobs.
        wake_s: Duration in which an engine gets its memory back after sleep.
        colocated: Whether generators and trainer share their devices, so that nothing is generated while a batch is
            trained.

    Raises:
        ConfigError: A field is wrong. The message names the field, the value and what is allowed.
    """

    num_replicas: int
    cost: CostModel
    max_running: int = 256
    kv_tokens: int = UNLIMITED
    move_below: float | None = None
    num_lent: int = 0
    adapts: bool = False
    train_s: float = 0.0
    logprob_s: float = 0.0
    wake_s: float = 0.0
    colocated: bool = False

    def __post_init__(self) -> None:
        for name, least in {"num_replicas": 1, "max_running": 1, "kv_tokens": 1, "num_lent": 0}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"Cluster.{name} is {getattr(self, name)!r}; it must be at least {least}")
        for name in ("train_s", "logprob_s", "wake_s"):
            if not (math.isfinite(seconds := getattr(self, name)) and seconds >= 0):
                raise ConfigError(f"Cluster.{name} is {seconds!r}; it must be finite and >= 0")
        if self.colocated and self.num_lent:
            raise ConfigError(
                f"Cluster.num_lent is {self.num_lent}, and on a colocated cluster all engines are on the trainer's "
                "devices already; set num_lent = 0, or colocated = False"
            )


LengthDraw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Workload:
    """Single-turn prompts. The lengths of answers depend only on seed, group and sibling, so every schedule gets the
    same lengths.

    Args:
        draw: Draws the number of tokens of an answer.
        group_size: Number of answers to a prompt. At least 2, because they are compared.

    Raises:
        ConfigError: A field is wrong. The message names the field, the value and what is allowed.
    """

    draw: LengthDraw
    group_size: int
    prompt_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"group_size": 2, "prompt_tokens": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"Workload.{name} is {getattr(self, name)!r}; it must be at least {least}")

    def length(self, index: int, sibling: int) -> int:
        """Number of tokens of the answer of one sibling in group number `index`."""
        return self.draw(random.Random(f"{self.seed}/{index}/{sibling}"))


def log_normal_with_tail(*, median: float, sigma: float, cap: int, tail: float = 0.03) -> LengthDraw:
    """Make a draw of lengths: log-normal, except a share `tail` that is uniform between 0.9 and 1.0 of the cap.

    Args:
        sigma: Standard deviation of the logarithm of the length.
    """

    def draw(random: random.Random) -> int:
        if random.random() < tail:
            return round(cap * random.uniform(0.9, 1.0))
        return min(cap, max(1, round(median * random.lognormvariate(0.0, sigma))))

    return draw


def equal(length: int) -> LengthDraw:
    return lambda random: length


GIVE_BACK_S = 1e3  # time limit; it takes one engine step


class LentEngines:
    """Replicas that serve a router only while the trainer waits.

    At the beginning of each such period they need `wake_s` seconds and a pull. At its end their requests are
    interrupted and continue on other replicas with their tokens. They receive only new requests, unless running ones
    are moved to them.
    """

    def __init__(self, router: GeneratorRouter, replicas: Sequence[SimulatedReplica], wake_s: float) -> None:
        self._router = router
        self._replicas = replicas
        self._wake_s = wake_s
        self._lent_s = 0.0  # duration of completed periods
        self._lent_since: float | None = None

    @property
    def lent_s(self) -> float:
        """Seconds of all replicas with the router until now, including the time in which they wake."""
        now = asyncio.get_running_loop().time()
        out_s = 0.0 if self._lent_since is None else now - self._lent_since
        return (self._lent_s + out_s) * len(self._replicas)

    @asynccontextmanager
    async def out(self) -> AsyncGenerator[None]:
        """Context manager: let the replicas serve within the block, once they are awake."""
        began = self._lent_since = asyncio.get_running_loop().time()
        waking = asyncio.ensure_future(self._wake())
        try:
            yield
        finally:
            waking.cancel()
            await asyncio.wait([waking])
            await self._give_back()
            self._lent_s += asyncio.get_running_loop().time() - began
            self._lent_since = None

    async def _wake(self) -> None:
        if self._replicas:
            await asyncio.sleep(self._wake_s)
            await asyncio.gather(*(self._router.add_replica(replica) for replica in self._replicas))

    async def _give_back(self) -> None:
        serving = [replica for replica in self._replicas if self._router.has_replica(replica.name)]
        retiring = [
            asyncio.ensure_future(self._router.retire_replica(replica.name, GIVE_BACK_S)) for replica in serving
        ]
        await asyncio.sleep(0)  # from now on they receive no requests
        await self._router.abort([request_id for replica in serving for request_id in replica.request_ids])
        await asyncio.gather(*retiring)


FOREVER_S = 1e8  # time limits handle faults, which a simulation does not have


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulated schedule, without the warm-up steps."""

    step_s: Sequence[float]  # [num_steps], seconds from batch to batch
    ages: Counter[int]  # number of groups by age: versions between a group's oldest token and its step
    trainer_idle: float  # share of the time
    generators_idle: float  # share of the engines' time; of lent engines, only the time with the router
    wasted_tokens: int
    preemptions: int
    moved: int  # requests moved between engines, including the warm-up
    accepted_lengths: Sequence[int]  # of all rollouts that were trained on
    offered_lengths: Sequence[int]  # of all rollouts of admitted groups

    @property
    def mean_step_s(self) -> float:
        return fmean(self.step_s)

    @property
    def length_bias(self) -> float:
        """Mean length of rollouts that were trained on, relative to that of all offered rollouts; 1 is unbiased."""
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
        strategy: Routing strategy. Defaults to the router's default.

    Raises:
        ConfigError: The cluster is colocated but generation would continue while the trainer works, the number of steps
            is too small, or an answer does not fit the KV cache of an engine.
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
    loop = looptime.new_event_loop()
    try:
        return loop.run_until_complete(_Simulation(workload, cluster, scheduling, strategy).run(num_steps, warmup))
    finally:
        loop.close()


def _check_fit(workload: Workload, cluster: Cluster, num_groups: int) -> None:
    """Check that the answers of the first groups fit the KV cache. The total number of groups is known only at the
    end."""
    if cluster.kv_tokens == UNLIMITED:
        return
    answers = ((group, sibling) for group in range(num_groups) for sibling in range(workload.group_size))
    longest = workload.prompt_tokens + max(workload.length(*answer) for answer in answers)
    if longest > cluster.kv_tokens:
        raise ConfigError(
            f"Cluster.kv_tokens is {cluster.kv_tokens}, and the longest request has {longest} tokens; set it to that "
            "at least, or shorten prompts and answers"
        )


class _OneTurnEnv:
    """Environment with one prompt and one answer."""

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
            adaptive_limit=AdaptiveLimit(cluster.max_running, cluster.kv_tokens) if cluster.adapts else None,
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
            seed=None,  # requests with seeds would stay on their replica
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
        """Train like the controller: the next step begins while generators pull, if its groups are ready."""
        loop = asyncio.get_running_loop()
        groups: list[RolloutGroup] = []
        step_s, waited_s, wasted = list[float](), 0.0, 0.0
        ages: Counter[int] = Counter()
        began = busy = had = 0.0
        preempted = 0
        pulling: asyncio.Task[None] | None = None
        for version in range(1, 1 + warmup + num_steps):  # versions that the simulated trainer makes
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
        """Total time of the engines until now, in seconds."""
        return asyncio.get_running_loop().time() * len(self._replicas) + self._trainers.lent_s

    def _num_preemptions(self) -> int:
        return sum(replica.num_preemptions for replica in [*self._replicas, *self._lent])


def _first_sibling(rollout: Rollout) -> float:
    return float(rollout.sibling == 0)
