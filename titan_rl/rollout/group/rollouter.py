"""Rollouter: runs the sibling rollouts of one sample, scores them, and compares them with each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Protocol, cast

from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.calls.user_code import Failure
from titan_rl.core.errors import StrayCancellationError
from titan_rl.core.tracing.spans import span
from titan_rl.rollout.copies import completion_to_give, messages_of, token_advantages_of, token_ids_of
from titan_rl.rollout.environment.messages import MAX_CONTEXT
from titan_rl.rollout.environment.seats import Player, SeatedEnv
from titan_rl.rollout.environment.threaded import ThreadedEnv, expected
from titan_rl.rollout.environment.types import AgentEnv, TokenEnv, TokenObservation, TokenStep
from titan_rl.rollout.group.boundary import EndsWith, EnvCalls, OwnTime, RolloutEnded
from titan_rl.rollout.group.game import LAST_CALL_S, play_game, rollouts_of_seats
from titan_rl.rollout.group.playing import play
from titan_rl.rollout.group.sessions import Callbacks
from titan_rl.rollout.group.turns import TurnTaker, new_rollout
from titan_rl.rollout.rewards.advantages import AdvantageFn, compare, standardized
from titan_rl.rollout.rewards.judging import Judging, JudgingPause
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus
from titan_rl.types import FinishReason, GenerateFn, SamplingParams

logger = logging.getLogger(__name__)


class GroupRunner(Protocol):
    """Runs the groups of a run: a `Rollouter`, or the workers that each have one."""

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


class Rollouter:
    """Runs groups of rollouts. It holds no state between groups, so any number may run at once.

    Generation and changes of weights are hidden behind the `GenerateFn`.

    A rollout ends in one of these ways:

        the environment says so                     the environment's status
        a completion used up its token budget       TRUNCATED_LENGTH, after the environment has seen it
        no room for a token after the next prompt   TRUNCATED_PROMPT
        `limits.max_turns` turns are taken          TRUNCATED_TURNS
        `limits.rollout_timeout_s` is used up       TRUNCATED_TIME, after the environment has seen what there is of the
                                                    answer; without an answer ERROR_TIMEOUT
        a completion was aborted                    ABORTED
        the environment raised                      ERROR_ENV
        generation raised                           ERROR_GENERATE
        another time limit passed                   ERROR_TIMEOUT

    In all cases the turns so far are kept, and the environment is closed once, also on cancellation. An `AgentEnv`
    takes its turns itself, and sets its status. In a `SeatedEnv` (a game), each seat that the policy plays is a
    rollout: docs/how_to/seats.md.

    Example:

        rollouter = Rollouter(SortEnv, Rubric([Reward(similarity)]), max_context=512)
        group = await rollouter.run_group(
            router.generate, sample, group_id="g17", group_size=8, sampling=SamplingParams(max_tokens=64)
        )
        group.rollouts[3].rollout_id                           # "g17/3", also its session id
        group.rollouts[3].turns[1].completion.request_id       # "g17/3/1"

    Args:
        make_env: makes the single-use environment of one rollout from a sample: a `TokenEnv`, an `AgentEnv` or a
            `SeatedEnv`.
        rubric: scores a group. An aborted group, which has an aborted sibling, is not scored.
        advantage: compares the rewards of the siblings that have one, without those that ended in a fault that is not
            the policy's (`RolloutStatus.is_fault`).
        limits: most turns, and seconds for a whole rollout and for each call of its environment.
        max_context: most tokens of prompt and completion together.
        seed: base of the sampling seeds if the `SamplingParams` have none; with None requests have no seeds.
        finish_session: called once with the session id of each rollout that has ended, also before it is run again.
            Its exceptions are logged once.
    """

    def __init__(
        self,
        make_env: Callable[[Any], TokenEnv | AgentEnv | SeatedEnv],
        rubric: Rubric,
        *,
        max_context: int,
        advantage: AdvantageFn = standardized,
        limits: RolloutConfig | None = None,
        seed: int | None = 0,
        finish_session: Callable[[str], object] | None = None,
    ) -> None:
        if not isinstance(max_context, int) or max_context < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"Rollouter max_context is {max_context!r}; it must hold a prompt and an answer: an integer, at least 2"
            )
        self.make_env = make_env
        self.rubric = rubric
        self.max_context = max_context
        self.advantage = advantage
        self.limits = limits or RolloutConfig()
        self.seed = seed
        self.finish_session = finish_session
        self._callbacks = Callbacks()
        self._judging_pause = JudgingPause(self.limits.judge_grace_s, self.limits.generate_timeout_s)

    def pause_judging(self) -> None:
        """Suspend judging while generation is paused: rewards in progress have `limits.judge_grace_s`, and are computed
        again after the pause if they need longer."""
        self._judging_pause.begin()

    def resume_judging(self) -> None:
        self._judging_pause.end()

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
        """Run `group_size` siblings at once, score each as it ends, and fill in their advantages.

        A sibling that fails is data and does not affect the others. After a fault that is not the policy's, it is run
        again in a fresh environment, up to `limits.max_retries` times for the group.

        A reward that fails for good ends the group at once: running siblings are stopped. Then its `FailurePolicy`
        decides: the group has a `failure` and neither rewards nor advantages, or the run ends.

        Args:
            on_finished: called with each rollout as it ends, before the group is scored. Its exceptions are logged
                once.

        Raises:
            RewardError: the advantage function failed, or a reward whose policy is to end the run.
            StrayCancellationError: a sibling was cancelled by other code.
        """
        if not isinstance(group_size, int) or group_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"group_size is {group_size!r}; it must be an integer, at least 1")

        def ended(rollout: Rollout) -> None:
            if on_finished is not None:
                self._callbacks.call("on_finished", on_finished, rollout)
            judging.ended(rollout)

        siblings = _Siblings(self, generate, group_id, group_size, sample, sampling)
        async with asyncio.TaskGroup() as tasks:
            judging = Judging(self.rubric, tasks, self._judging_pause, siblings.stop)
            siblings.start(tasks, ended)
        group = RolloutGroup(group_id, sample, siblings.rollouts())
        await judging.finish(group)
        compare(group, self.advantage)
        return group

    async def run_rollout(self, generate: GenerateFn, sampling: SamplingParams, rollouts: list[Rollout]) -> None:
        """Run one rollout in place. In an environment with several seats it becomes one for each seat of the policy."""
        with span("rollout", "environment", lane="rollout", fine=True, rollout=rollouts[0].rollout_id):
            await self._run_timed(generate, sampling, rollouts)

    async def _run_timed(self, generate: GenerateFn, sampling: SamplingParams, rollouts: list[Rollout]) -> None:
        MAX_CONTEXT.set(self.max_context)
        loop = asyncio.get_running_loop()
        start = loop.time()
        watch = Stopwatch(self.limits.rollout_timeout_s)
        seeded = replace(sampling, seed=self.seed if sampling.seed is None else sampling.seed)
        (rollout,) = rollouts
        turns = TurnTaker(rollout, generate, seeded, OwnTime(watch, rollouts), self.limits, self.max_context)
        env: EnvCalls | None = None
        players: Mapping[str, Player] = {}
        try:
            async with EndsWith(RolloutStatus.ERROR_ENV):
                made = self._make_env(rollout.sample)
                env = EnvCalls(made)
                if env.asks and isinstance(made, SeatedEnv):
                    players = made.players(rollout.sibling)
                    rollouts[:] = rollouts_of_seats(rollout, players)
            if env.asks and isinstance(made, SeatedEnv):
                await play_game(env, rollout.rollout_id, players, rollouts, turns)
            elif env.asks and isinstance(made, AgentEnv):
                await play(env, turns, env_rewards=self.rubric.env_rewards)
            else:
                rollout.status = await self._take_turns(env, turns)
        except RolloutEnded as end:
            for rollout in rollouts:
                rollout.status, rollout.error, rollout.failure = end.status, end.error, end.failure
        finally:
            failure: Failure | None = None
            try:
                failure = None if env is None else await env.close(self.limits.env_timeout_s)
            finally:
                for rollout in rollouts:
                    self._give_back(rollout, failure)
                    rollout.metrics |= {"seconds": loop.time() - start, "own_seconds": watch.used_s}
                    rollout.metrics["env_seconds"] = 0.0 if env is None else env.own_seconds(watch.asked_s)

    def _give_back(self, rollout: Rollout, close_failure: Failure | None) -> None:
        if close_failure is not None:
            rollout.metrics["close_failed"] = 1.0
            rollout.error = rollout.error or f"close: {close_failure.error}"
        if self.finish_session is not None:
            self._callbacks.call("finish_session", self.finish_session, rollout.rollout_id)

    def _make_env(self, sample: Any) -> TokenEnv | AgentEnv | SeatedEnv:
        def made() -> TokenEnv | AgentEnv | SeatedEnv:
            env = self.make_env(sample)
            kind = type(env).__name__
            is_token_env = all(callable(getattr(env, name, None)) for name in ("reset", "step", "close"))
            if is_token_env and not self.limits.env_in_thread:  # a check of the protocol takes several times as long
                return env
            if isinstance(env, AgentEnv | SeatedEnv):
                if self.limits.env_in_thread:
                    raise TypeError(f"{kind} needs the event loop; set rollout.env_in_thread = false")
            elif not is_token_env:
                raise TypeError(f"make_env gave {kind}; it must give an environment, with reset, step and close")
            return env

        return cast("TokenEnv", ThreadedEnv(made)) if self.limits.env_in_thread else made()

    async def _take_turns(self, env: EnvCalls, turns: TurnTaker) -> RolloutStatus:
        rollout = turns.rollout
        async with self._env_call(turns.own_time):
            observation = expected(await env.reset(), TokenObservation, env.env, "reset")
            rollout.messages.extend(messages_of(observation.messages))
            prompt = self._prompt_of(observation.prompt_token_ids, "the prompt")

        for _ in range(self.limits.max_turns):
            is_cut = await turns.take(prompt)
            completion = rollout.turns[-1].completion
            async with self._env_call(turns.own_time):
                step = expected(await env.step(completion_to_give(completion)), TokenStep, env.env, "step")
                rollout.turns[-1] = replace(
                    rollout.turns[-1],
                    rewards={name: float(reward) for name, reward in step.rewards.items()},
                    token_advantages=token_advantages_of(step.token_advantages, completion),
                )
                rollout.messages.extend(messages_of(step.messages))
                prompt = self._prompt_of(step.prompt_token_ids or (), "the next prompt")
            if is_cut:
                raise turns.own_time.is_up()
            if completion.finish_reason is FinishReason.LENGTH and step.status in (None, RolloutStatus.COMPLETED):
                return RolloutStatus.TRUNCATED_LENGTH
            if step.status is not None:
                rollout.error = step.error
                return step.status
        return RolloutStatus.TRUNCATED_TURNS

    def _prompt_of(self, given: Sequence[int], what: str) -> list[int]:
        """Copy of a prompt. One longer than the context will be refused by its length alone, so its tokens are not
        read."""
        too_long = isinstance(given, Sized) and len(given) > self.max_context  # pyright: ignore[reportUnnecessaryIsInstance]
        return [0] * len(given) if too_long else token_ids_of(given, what)

    def _env_call(self, own_time: OwnTime) -> EndsWith:
        """Context of a call of the environment, within its limit and the rollout's remaining time. An environment may
        respond to a finished answer even if hardly any time is left."""
        own_s, limit_s = max(own_time.watch.left_s, LAST_CALL_S), self.limits.env_timeout_s
        return EndsWith(
            RolloutStatus.ERROR_ENV,
            asyncio.get_running_loop().time() + min(own_s, limit_s),
            watch=own_time.watch,
            own_time=own_time if own_s < limit_s else None,
        )


class _Siblings:
    """Rollouts of one group: run concurrently, run again after a fault, and stopped together.

    A sibling is a list, because its rollout becomes one for each seat of the policy if the environment has several.
    """

    def __init__(
        self,
        rollouter: Rollouter,
        generate: GenerateFn,
        group_id: str,
        group_size: int,
        sample: Any,
        sampling: SamplingParams,
    ) -> None:
        self._rollouter = rollouter
        self._generate = generate
        self._sampling = sampling
        self._retries_left = rollouter.limits.max_retries  # of all siblings together
        self._siblings = [[new_rollout(group_id, sibling, sample)] for sibling in range(group_size)]
        self._tasks: list[asyncio.Task[None]] = []
        self._why_stopped: str | None = None

    def start(self, tasks: asyncio.TaskGroup, ended: Callable[[Rollout], None]) -> None:
        """Start all siblings.

        Args:
            ended: called with each rollout when its sibling has ended for good, or was stopped. It is not stored: a
                cycle of references would keep the group's tokens until the garbage collector finds it.
        """
        self._tasks = [tasks.create_task(self._run_sibling(sibling, ended)) for sibling in range(len(self._siblings))]

    def stop(self, why: str) -> None:
        """End the running siblings as ABORTED, with the turns they have."""
        self._why_stopped = why
        for task in self._tasks:
            task.cancel()

    def rollouts(self) -> list[Rollout]:
        """All rollouts, siblings in order. Call after the task group has ended.

        Raises:
            StrayCancellationError: a sibling was cancelled by other code.
        """
        for task, rollouts in zip(self._tasks, self._siblings, strict=True):
            if task.cancelled():
                what = f"rollout {rollouts[0].rollout_id!r}"
                raise StrayCancellationError(f"{what} was cancelled, though nobody had asked for that")
        return [rollout for rollouts in self._siblings for rollout in rollouts]

    async def _run_sibling(self, sibling: int, ended: Callable[[Rollout], None]) -> None:
        attempt = 0
        while True:
            rollouts = self._siblings[sibling]
            first = rollouts[0]
            try:
                await self._rollouter.run_rollout(self._generate, self._sampling, rollouts)
            except asyncio.CancelledError:
                if self._why_stopped is None:
                    raise
                for rollout in rollouts:
                    rollout.status, rollout.error = RolloutStatus.ABORTED, self._why_stopped
            failed = next((rollout for rollout in rollouts if rollout.status.is_fault), None)
            if failed is None or self._retries_left == 0:
                break
            self._retries_left -= 1
            attempt += 1
            logger.warning("%s is run again after %s: %s", failed.rollout_id, failed.status, failed.error)
            self._siblings[sibling] = [new_rollout(first.group_id, sibling, first.sample, attempt)]
        for rollout in rollouts:
            rollout.metrics["retries"] = float(attempt)
            ended(rollout)
