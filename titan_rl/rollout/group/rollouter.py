"""Groups of rollouts: siblings of one sample run concurrently, are scored, and are compared with each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from titan_rl.core.calls.cancellation import is_ctrl_c
from titan_rl.core.calls.user_code import Failure, describe
from titan_rl.core.errors import RewardError, StrayCancellationError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.environment.types import AgentEnv, SeatedEnv, TokenEnv
from titan_rl.rollout.group.rollout import RolloutRunner
from titan_rl.rollout.rewards.advantages import AdvantageFn, compare, standardized
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus, sample_alone
from titan_rl.types import GenerateFn, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GroupRunner(Protocol):
    """Runs the groups of a run: a `Rollouter`, or worker processes that have one each."""

    async def run_group(
        self,
        generate: GenerateFn,
        sample: Any,
        *,
        group_id: str,
        group_size: int,
        sampling: SamplingParams,
        on_finished: Callable[[Rollout], None] | None = None,
    ) -> RolloutGroup:
        """Run, score and compare the siblings of one sample; see `Rollouter.run_group`."""
        ...

    def pause_judging(self) -> None:
        """Suspend judging; see `Rollouter.pause_judging`."""
        ...

    def resume_judging(self) -> None: ...


@dataclass(eq=False)
class Rollouter:
    """Runs groups of rollouts. It holds no state between groups, so any number may run at once.

    Generation and changes of weights happen inside the `GenerateFn`.

    A rollout ends in one of these ways:

        the environment returns a status            the environment's status
        a completion used up its token budget       TRUNCATED_LENGTH, after the environment has seen it
        no room for a token after the next prompt   TRUNCATED_PROMPT
        `limits.max_turns` turns are taken          TRUNCATED_TURNS
        `limits.rollout_timeout_s` is used up       TRUNCATED_TIME, after the environment has seen the partial answer;
                                                    without any answer ERROR_TIMEOUT
        a completion was aborted                    ABORTED
        the environment raised                      ERROR_ENV
        generation raised                           ERROR_GENERATE
        another time limit passed                   ERROR_TIMEOUT

    In all cases the turns so far are kept, and the environment is closed once, also on cancellation. An `AgentEnv`
    takes its turns itself, and sets the status. In a `SeatedEnv` (a game), each seat that the policy plays is a
    rollout; see docs/how_to/seats.md.

    Example:

        rollouter = Rollouter(SortEnv, Rubric([Reward(similarity)]), max_context=512)
        group = await rollouter.run_group(
            router.generate, sample, group_id="g17", group_size=8, sampling=SamplingParams(max_tokens=64)
        )
        group.rollouts[3].rollout_id                           # "g17/3", also its session id
        group.rollouts[3].turns[1].completion.request_id       # "g17/3/1"

    Args:
        make_env: Makes the single-use environment of one rollout from a sample: a `TokenEnv`, an `AgentEnv` or a
            `SeatedEnv`.
        rubric: Scores a group. An aborted group, which has an aborted sibling, is not scored.
        max_context: Largest number of tokens of prompt and completion together.
        advantage: Compares the rewards of the siblings that have one, without siblings that ended in a fault that is
            not the policy's (`RolloutStatus.is_fault`).
        limits: Limits of the turns, of the seconds of a whole rollout, and of those of each call of its environment.
        seed: Base of the sampling seeds if the `SamplingParams` have none. None sets no seeds.
        finish_session: Called once with the session id of each rollout that has ended, also before it is run again.
            Its exceptions are logged once.
    """

    make_env: Callable[[Any], TokenEnv | AgentEnv | SeatedEnv]
    rubric: Rubric
    _: KW_ONLY
    max_context: int
    advantage: AdvantageFn = standardized
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    seed: int | None = 0
    finish_session: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_context, int) or self.max_context < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"Rollouter max_context is {self.max_context!r}; it must hold a prompt and an answer: an integer, at "
                "least 2"
            )
        self.callbacks = Callbacks()
        self.judging_pause = JudgingPause(self.limits.generate_timeout_s)

    def pause_judging(self) -> None:
        """Suspend judging while generation is paused. Rewards in progress have `JUDGE_GRACE_S` seconds to finish. Those
        that need longer are cancelled, and computed again after the pause."""
        self.judging_pause.begin()

    def resume_judging(self) -> None:
        self.judging_pause.end()

    async def run_group(
        self,
        generate: GenerateFn,
        sample: Any,
        *,
        group_id: str,
        group_size: int,
        sampling: SamplingParams,
        on_finished: Callable[[Rollout], None] | None = None,
    ) -> RolloutGroup:
        """Run `group_size` siblings concurrently, score each as it ends, and fill in their advantages.

        A sibling that fails is data and does not affect the others. After a fault that is not the policy's, it is run
        again in a fresh environment, up to `limits.max_retries` times for the group.

        A reward that fails permanently ends the group immediately: running siblings are stopped. Depending on the
        reward's `FailurePolicy`, the group then has a `failure` and neither rewards nor advantages, or the run ends.

        Args:
            generate: Sends a request.
            sample: Sample of the task, or a `Matched` that contains one.
            group_id: ID of the group, such as "g17".
            group_size: Number of siblings.
            sampling: Sampling parameters.
            on_finished: Called with each rollout as it ends, before the group is scored. Its exceptions are logged
                once.

        Raises:
            RewardError: the advantage function failed, or a reward failed whose policy is to end the run.
            StrayCancellationError: a sibling was cancelled by other code.
        """
        if not isinstance(group_size, int) or group_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"group_size is {group_size!r}; it must be an integer, at least 1")
        runner = RolloutRunner(
            partial(self.make_env, sample),
            generate,
            replace(sampling, seed=self.seed if sampling.seed is None else sampling.seed),
            self.limits,
            self.max_context,
            self.rubric.env_rewards,
        )
        sample = sample_alone(sample)
        running = _RunningGroup(self, runner, [_new_rollout(group_id, number, sample) for number in range(group_size)])
        async with asyncio.TaskGroup() as tasks:
            running.start(tasks, on_finished)
        group = RolloutGroup(group_id, sample, running.rollouts())
        await running.score(group)
        compare(group, self.advantage)
        return group


class _RunningGroup:
    """Siblings of one group while they run: each is retried after a fault, and judged when it ends.

    The group has no rewards if a sibling was aborted or a reward fails permanently. A failed reward also stops the
    running siblings.
    """

    def __init__(self, rollouter: Rollouter, runner: RolloutRunner, rollouts: Sequence[Rollout]) -> None:
        self._rollouter = rollouter
        self._rubric = rollouter.rubric
        self._runner = runner
        self._retries_left = rollouter.limits.max_retries  # shared by all siblings
        self._siblings = [[rollout] for rollout in rollouts]  # a sibling has one rollout for each seat of the policy
        self._tasks: list[asyncio.Task[None]] = []
        self._judges: list[asyncio.Task[None]] = []
        self._values: dict[str, dict[str, float]] = {}  # rewards judged before the group ends, by rollout id
        self._failed: RewardError | None = None
        self._is_aborted = False

    def start(self, tasks: asyncio.TaskGroup, on_finished: Callable[[Rollout], None] | None) -> None:
        """Start all siblings in `tasks`, a task group in which the judges also run. Neither argument is stored: a cycle
        of references would keep the group's tokens until the garbage collector finds it."""
        numbers = range(len(self._siblings))
        self._tasks = [tasks.create_task(self._run_sibling(number, tasks, on_finished)) for number in numbers]

    def rollouts(self) -> list[Rollout]:
        """All rollouts, siblings in order. Call after the task group has ended.

        Raises:
            StrayCancellationError: a sibling was cancelled by other code.
        """
        for task, rollouts in zip(self._tasks, self._siblings, strict=True):
            if task.cancelled():
                what = f"rollout {rollouts[0].rollout_id!r}"
                raise StrayCancellationError(f"{what} was cancelled, although nobody requested it")
        return [rollout for rollouts in self._siblings for rollout in rollouts]

    async def score(self, group: RolloutGroup) -> None:
        """Score the group. Call after the task group has ended.

        Raises:
            RewardError: a reward function has failed whose policy is to end the run. If the policy is to drop the
                group, `group.failure` is set instead.
        """
        if self._failed is None and not group.is_aborted:
            try:
                with _timed(group.rollouts):
                    # In a separate task: a judge that cancels the current task must not cancel the group.
                    scoring = self._rollouter.judging_pause.run(lambda: self._rubric.score(group, self._values))
                    await asyncio.ensure_future(scoring)
            except RewardError as error:
                self._failed = error
        if self._failed is None:
            return
        if self._failed.ends_run:
            raise self._failed
        failure = Failure.of(self._failed, f"RewardError: {self._failed.text}")
        group.failure = replace(failure, where=self._failed.where)
        for rollout in group.rollouts:
            if rollout.error is None:
                rollout.error, rollout.failure = group.failure.error, group.failure
        logger.warning("group %s is dropped: %s", group.group_id, self._failed)

    async def _run_sibling(
        self, number: int, tasks: asyncio.TaskGroup, on_finished: Callable[[Rollout], None] | None
    ) -> None:
        attempt = 0
        while True:
            rollouts = self._siblings[number]
            first = rollouts[0]
            try:
                with span("rollout", "environment", lane="rollout", fine=True, rollout=first.rollout_id):
                    await self._runner.run(rollouts)
            except asyncio.CancelledError:
                if self._failed is None:
                    raise
                for rollout in rollouts:
                    rollout.status = RolloutStatus.ABORTED
                    rollout.error = f"stopped because a sibling could not be judged: {self._failed}"
            finally:
                self._finish_sessions(rollouts)
            failed = next((rollout for rollout in rollouts if rollout.status.is_fault), None)
            if failed is None or self._retries_left == 0:
                break
            self._retries_left -= 1
            attempt += 1
            logger.warning("%s is run again after %s: %s", failed.rollout_id, failed.status, failed.error)
            self._siblings[number] = [_new_rollout(first.group_id, number, first.sample, attempt)]
        for rollout in rollouts:
            rollout.metrics["retries"] = float(attempt)
            if on_finished is not None:
                with self._rollouter.callbacks.guarded("on_finished"):
                    on_finished(rollout)
            if rollout.status is RolloutStatus.ABORTED:
                self._is_aborted = True
                self._stop_judging()
            elif not self._is_aborted and self._failed is None:
                self._judges.append(tasks.create_task(self._judge(rollout), name=f"judge-{rollout.rollout_id}"))

    def _finish_sessions(self, rollouts: Sequence[Rollout]) -> None:
        if (finish_session := self._rollouter.finish_session) is not None:
            for rollout in rollouts:
                with self._rollouter.callbacks.guarded("finish_session"):
                    finish_session(rollout.rollout_id)

    async def _judge(self, rollout: Rollout) -> None:
        try:
            with _timed([rollout]):
                values = await self._rollouter.judging_pause.run(lambda: self._rubric.begin(rollout))
                self._values[rollout.rollout_id] = values
        except RewardError as error:
            if self._failed is None:
                self._failed = error
                self._stop_judging()
                for task in self._tasks:
                    task.cancel()

    def _stop_judging(self) -> None:
        for judge in self._judges:
            judge.cancel()


def _new_rollout(group_id: str, sibling: int, sample: Any, attempt: int = 0) -> Rollout:
    """Make a rollout that has not begun, with the ID "g17/3", or "g17/3~1" for its second attempt."""
    rollout_id = f"{group_id}/{sibling}" + (f"~{attempt}" if attempt else "")
    return Rollout(rollout_id, group_id, sibling, sample)


@contextmanager
def _timed(rollouts: Sequence[Rollout]) -> Generator[None]:
    """Context whose time, including pauses, is divided among the rollouts' `reward_seconds`."""
    clock = asyncio.get_running_loop().time
    began = clock()
    yield
    for rollout in rollouts:
        before = rollout.metrics.get("reward_seconds", 0.0)
        rollout.metrics["reward_seconds"] = before + (clock() - began) / len(rollouts)


JUDGE_GRACE_S = 10.0


class JudgingPause:
    """Pause of judging. Judges in progress may finish within `JUDGE_GRACE_S`; then they are cancelled, and restart
    after the pause. Judges that start during the pause wait for its end.

    Args:
        limit_s: Longest time that a judge waits for the end of the pause; then it continues regardless.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._over = asyncio.Event()
        self._over.set()
        self._grace: asyncio.TimerHandle | None = None
        self._at_work: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """Begin a pause with its grace period. Does nothing during a pause."""
        if self._over.is_set():
            self._over.clear()
            self._grace = asyncio.get_running_loop().call_later(JUDGE_GRACE_S, self._cancel_all)

    def end(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        self._over.set()

    async def run(self, judge: Callable[[], Awaitable[T]]) -> T:
        """Call a judge when there is no pause, and return its result. A call that outlasts a grace period is cancelled,
        and repeated after the pause."""
        while True:
            if not self._over.is_set():
                await self._wait()
            scope = asyncio.timeout(None)
            try:
                async with scope:
                    self._at_work.add(scope)
                    return await judge()
            except TimeoutError:
                if not scope.expired():
                    raise
            finally:
                self._at_work.discard(scope)

    def _cancel_all(self) -> None:
        now = asyncio.get_running_loop().time()
        working = [scope for scope in self._at_work if not scope.expired()]  # others still end since an earlier pause
        for scope in working:
            scope.reschedule(now)
        if working:
            count = len(working)
            logger.warning("cancelled %d rewards %g s into a pause; they restart after it", count, JUDGE_GRACE_S)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await self._over.wait()
        except TimeoutError:
            logger.warning("the pause has lasted %g s; judging continues regardless", self._limit_s)


class Callbacks:
    """Guard for users' callbacks: exceptions are logged, once for each name, and suppressed.

    Example:

        callbacks = Callbacks()
        with callbacks.guarded("finish_session"):
            router.finish_session("g17/3")
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @contextmanager
    def guarded(self, name: str) -> Generator[None]:
        """Context of one call, in which nothing may be awaited."""
        try:
            yield
        except BaseException as error:  # without an await, a CancelledError cannot come from the caller
            if is_ctrl_c(error):
                raise
            if name not in self._failed:
                self._failed.add(name)
                logger.error(
                    "%s failed: %s; it is reported once, and the run continues", name, describe(error), exc_info=error
                )
