"""One rollout: makes its environment, plays it to its end within the limits, and closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from titan_rl.core.calls.bounded import OutOfTimeError, limited
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.core.calls.user_code import Failure
from titan_rl.rollout.checked_copies import completion_for_user, messages_of, token_advantages_of, token_ids_of
from titan_rl.rollout.environment.messages import MAX_CONTEXT
from titan_rl.rollout.environment.threaded import ThreadedEnv, expected
from titan_rl.rollout.environment.types import (
    AgentEnv,
    Player,
    RolloutPolicy,
    SeatedEnv,
    TokenEnv,
    TokenObservation,
    TokenStep,
)
from titan_rl.rollout.group.game import play_game, rollouts_of_seats
from titan_rl.rollout.group.turns import LAST_CALL_S, RequestIds, TurnTaker, generate_within, used_up
from titan_rl.rollout.group.user_code_boundary import EnvCalls, RolloutEnded, TimeBudget, UserCodeBoundary
from titan_rl.rollout.settings import RolloutConfig
from titan_rl.rollout.shared_tokens import share_tokens
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn
from titan_rl.types import Completion, FinishReason, GenerateFn, SamplingParams, float_or_none, require_member


@dataclass(frozen=True, slots=True)
class RolloutRunner:
    """Runs the rollouts of one group, each in a fresh environment.

    Args:
        make_env: Makes the environment of a rollout.
        generate: Sends a request.
        sampling: Sampling parameters of the turns. Their seed is the base of the turns' seeds; None sets no seeds.
        limits: Limits of a rollout.
        max_context: Largest number of tokens of prompt and completion together.
        env_rewards: Names of the rewards that the rubric expects of an environment.
    """

    make_env: Callable[[], TokenEnv | AgentEnv | SeatedEnv]
    generate: GenerateFn
    sampling: SamplingParams
    limits: RolloutConfig
    max_context: int
    env_rewards: Sequence[str]

    async def run(self, rollouts: list[Rollout]) -> None:
        """Run one rollout in place. In an environment with several seats it becomes one rollout for each seat of the
        policy."""
        MAX_CONTEXT.set(self.max_context)
        loop = asyncio.get_running_loop()
        start = loop.time()
        watch = Stopwatch(self.limits.rollout_timeout_s)
        (rollout,) = rollouts
        time_budget = TimeBudget(watch, rollouts)
        turns = TurnTaker(rollout, self.generate, self.sampling, time_budget, self.limits, self.max_context)
        env: EnvCalls | None = None
        players: Mapping[str, Player] = {}
        try:
            async with UserCodeBoundary(RolloutStatus.ERROR_ENV):
                env = EnvCalls(ThreadedEnv(self._checked_env) if self.limits.env_in_thread else self._checked_env())
                if env.has_seats:
                    players = env.env.players(rollout.sibling)
                    rollouts[:] = rollouts_of_seats(rollout, players)
            if env.has_seats:
                await play_game(env, rollout.rollout_id, players, rollouts, turns)
            elif env.is_agent:
                await _play_agent(env, turns, self.env_rewards)
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
                    if failure is not None:
                        rollout.metrics["close_failed"] = 1.0
                        rollout.error = rollout.error or f"close: {failure.error}"
                    rollout.metrics |= {"seconds": loop.time() - start, "own_seconds": watch.used_s}
                    rollout.metrics["env_seconds"] = 0.0 if env is None else env.own_seconds(watch.request_s)

    def _checked_env(self) -> TokenEnv | AgentEnv | SeatedEnv:
        env = self.make_env()
        is_token_env = all(callable(getattr(env, name, None)) for name in ("reset", "step", "close"))
        if is_token_env and not self.limits.env_in_thread:  # a check of the protocol takes several times as long
            return env
        name, needs_loop = type(env).__name__, isinstance(env, AgentEnv | SeatedEnv)
        if not (is_token_env or needs_loop):
            raise TypeError(f"make_env returned {name}; it must return an environment, with reset, step and close")
        if needs_loop and self.limits.env_in_thread:
            raise TypeError(f"{name} needs the event loop; set rollout.env_in_thread = false")
        return env

    async def _take_turns(self, env: EnvCalls, turns: TurnTaker) -> RolloutStatus:
        rollout = turns.rollout
        async with self._env_call(turns.time_budget):
            observation = expected(await env.reset(), TokenObservation, env.env, "reset")
            rollout.messages.extend(messages_of(observation.messages))
            prompt = self._prompt_of(observation.prompt_token_ids, "the prompt")

        for _ in range(self.limits.max_turns):
            is_cut = await turns.take(prompt)
            completion = rollout.turns[-1].completion
            async with self._env_call(turns.time_budget):
                step = expected(await env.step(completion_for_user(completion)), TokenStep, env.env, "step")
                rollout.turns[-1] = replace(
                    rollout.turns[-1],
                    rewards={name: float(reward) for name, reward in step.rewards.items()},
                    token_advantages=token_advantages_of(step.token_advantages, completion),
                )
                rollout.messages.extend(messages_of(step.messages))
                prompt = self._prompt_of(step.prompt_token_ids or (), "the next prompt")
            if is_cut:
                raise turns.time_budget.error()
            if completion.finish_reason is FinishReason.LENGTH and step.status in (None, RolloutStatus.COMPLETED):
                return RolloutStatus.TRUNCATED_LENGTH
            if step.status is not None:
                rollout.error = step.error
                return step.status
        return RolloutStatus.TRUNCATED_TURNS

    def _prompt_of(self, given: Sequence[int], what: str) -> list[int]:
        """Copy of a prompt. A prompt longer than the context will be refused, so its tokens are not read."""
        too_long = isinstance(given, Sized) and len(given) > self.max_context  # pyright: ignore[reportUnnecessaryIsInstance]
        return [0] * len(given) if too_long else token_ids_of(given, what)

    def _env_call(self, time_budget: TimeBudget) -> AbstractAsyncContextManager[None]:
        """Context of a call of the environment, within the limit of calls and the rollout's remaining time. An
        environment may respond to a finished answer even if hardly any time is left."""
        own_s, limit_s = max(time_budget.watch.left_s, LAST_CALL_S), self.limits.env_timeout_s
        return UserCodeBoundary(
            RolloutStatus.ERROR_ENV,
            asyncio.get_running_loop().time() + min(own_s, limit_s),
            watch=time_budget.watch,
            time_budget=time_budget if own_s < limit_s else None,
        )


async def _play_agent(env: EnvCalls, turns: TurnTaker, env_rewards: Sequence[str]) -> None:
    """Let an `AgentEnv` fill in the rollout of `turns`. When its time is up it has `limits.env_timeout_s` to end.

    Raises:
        RolloutEnded: the environment raised an error or filled in an invalid rollout (ERROR_ENV), or continued after
            the end of its time.
    """
    rollout, watch, limits = turns.rollout, turns.time_budget.watch, turns.limits

    async def generate(
        prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
    ) -> Completion:
        own_id = request_ids.next(prompt_token_ids, sampling)
        async with limited(limits.generate_timeout_s, "the completion"):
            completion = await generate_within(
                watch, turns.generate, prompt_token_ids, request_id=own_id, session_id=session_id, sampling=sampling
            )
        if watch.is_over:
            time_is_up.set()
        return replace(completion, request_id=request_id)

    time_is_up = asyncio.Event()
    request_ids = RequestIds(rollout.rollout_id)
    policy = RolloutPolicy(
        rollout_id=rollout.rollout_id,
        generate=generate,
        sampling=turns.sampling,
        max_context=turns.max_context,
        max_turns=limits.max_turns,
        time_s=watch.limit_s,
        time_is_up=time_is_up,
        waiting=watch.pause,
        env_rewards=env_rewards,
    )
    try:
        async with (
            _signalled_when_over(watch, time_is_up, limits.env_timeout_s),
            UserCodeBoundary(RolloutStatus.ERROR_ENV, watch=watch),
        ):
            await env.play(policy, rollout)
            _check_played(rollout)
            rollout.turns = share_tokens(rollout.turns)
    except OutOfTimeError:
        raise turns.time_budget.error() from None


@asynccontextmanager
async def _signalled_when_over(watch: Stopwatch, time_is_up: asyncio.Event, grace_s: float) -> AsyncGenerator[None]:
    """Set the event when the stopwatch's time is used up. The block may take `grace_s` longer.

    Raises:
        OutOfTimeError: the block took longer.
    """
    scope = asyncio.timeout(None)

    async def look() -> None:
        await used_up(watch)
        time_is_up.set()
        scope.reschedule(asyncio.get_running_loop().time() + grace_s)

    looking: asyncio.Task[None] | None = None
    try:
        async with scope:
            looking = asyncio.create_task(look())
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise OutOfTimeError(f"the environment still runs {grace_s:g} s after its time was up") from error
    finally:
        if looking is not None:
            looking.cancel()


def _check_played(rollout: Rollout) -> None:
    """Check a rollout that an environment filled in, and convert its numbers to floats, which journals and logs accept.

    Raises:
        TypeError: a turn is not a `Turn`, or a metric or reward is not a number.
        ValueError: the status is not a `RolloutStatus`.
    """
    require_member(rollout, "status", RolloutStatus)
    rollout.metrics = _floats(rollout.metrics, "metrics")
    for turn in rollout.turns:
        if not isinstance(turn, Turn):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"play added a turn of type {type(turn).__name__}; it must be a Turn")
    rollout.turns = [
        replace(
            turn,
            completion=replace(turn.completion),  # checked again, since the environment may have changed its lists
            rewards=_floats(turn.rewards, "a turn's rewards"),
            token_advantages=token_advantages_of(turn.token_advantages, turn.completion),
        )
        for turn in rollout.turns
    ]


def _floats(values: Mapping[Any, Any], what: str) -> dict[str, float]:
    floats = {str(name): float_or_none(value) for name, value in values.items()}
    for name, value in floats.items():
        if value is None:
            raise TypeError(f"play filled in {what} with {name!r}: {values[name]!r}; it must map names to numbers")
    return cast("dict[str, float]", floats)
