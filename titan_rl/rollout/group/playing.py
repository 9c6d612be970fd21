"""Play of an `AgentEnv`, which sends its requests to the policy itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from titan_rl.core.calls.bounded import OutOfTimeError, limited
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.rollout.copies import shared, token_advantages_of
from titan_rl.rollout.environment.types import RolloutPolicy
from titan_rl.rollout.group.boundary import EndsWith, EnvCalls
from titan_rl.rollout.group.turns import RequestIds, TurnTaker, generate_within
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn
from titan_rl.types import Completion, SamplingParams, float_or_none, require_member

_LOOK_S = 0.05  # least time between two checks of a paused watch


async def play(env: EnvCalls, turns: TurnTaker, *, env_rewards: Sequence[str]) -> None:
    """Have an `AgentEnv` fill in the rollout of `turns`. When its time is up it has `limits.env_timeout_s` to end.

    Raises:
        RolloutEnded: it raised or filled in an invalid rollout (ERROR_ENV), or continued after the end of its time.
    """
    rollout, watch, limits = turns.rollout, turns.own_time.watch, turns.limits

    async def ask(
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
        generate=ask,
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
            EndsWith(RolloutStatus.ERROR_ENV, watch=watch),
        ):
            await env.play(policy, rollout)
            _check(rollout)
            rollout.turns = shared(rollout.turns)
    except OutOfTimeError:
        raise turns.own_time.is_up() from None


@asynccontextmanager
async def _signalled_when_over(watch: Stopwatch, time_is_up: asyncio.Event, grace_s: float) -> AsyncGenerator[None]:
    """Set the event once the watch is over. The block may take `grace_s` longer.

    Raises:
        OutOfTimeError: it took longer.
    """
    scope = asyncio.timeout(None)

    async def look() -> None:
        while not watch.is_over:  # noqa: ASYNC110  it pauses and continues as requests wait
            await asyncio.sleep(max(watch.left_s, _LOOK_S))
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


def _check(rollout: Rollout) -> None:
    """Check a rollout that an environment filled in, and convert its numbers to floats, which journals and logs accept.

    Raises:
        TypeError: a turn is not a `Turn`, or a metric or reward is not a number.
        ValueError: the status is not a `RolloutStatus`.
    """
    require_member(rollout, "status", RolloutStatus)
    rollout.metrics = _floats(rollout.metrics, "metrics")
    for turn in rollout.turns:
        if not isinstance(turn, Turn):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"play gave a turn of type {type(turn).__name__}; it must give a Turn")
    rollout.turns = [_plain_turn(turn) for turn in rollout.turns]


def _plain_turn(turn: Turn) -> Turn:
    advantages = turn.token_advantages
    if all(type(value) is float for value in turn.rewards.values()) and advantages is None:
        return turn
    return replace(
        turn,
        rewards=_floats(turn.rewards, "a turn's rewards"),
        token_advantages=token_advantages_of(advantages, turn.completion),
    )


def _floats(values: Mapping[Any, Any], what: str) -> dict[str, float]:
    floats = {str(name): float_or_none(value) for name, value in values.items()}
    for name, value in floats.items():
        if value is None:
            raise TypeError(f"play gave {what} with {name!r}: {values[name]!r}; it must map names to numbers")
    return cast("dict[str, float]", floats)
