"""Environments that ask the policy themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from titan_rl.core.calls.bounded import OutOfTimeError, limited
from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.rollout.copies import shared, token_advantages_of
from titan_rl.rollout.environment.types import RolloutPolicy
from titan_rl.rollout.group.boundary import EndsWith, EnvCalls, RolloutEnded
from titan_rl.rollout.group.turns import RequestIds, generate_within
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn
from titan_rl.types import Completion, GenerateFn, SamplingParams, float_or_none, require_member

_LOOK_S = 0.05  # at least between two looks at a watch that stands


async def play(
    env: EnvCalls,
    generate: GenerateFn,
    sampling: SamplingParams,
    rollout: Rollout,
    watch: Stopwatch,
    *,
    max_context: int,
    max_turns: int,
    env_rewards: Sequence[str],
    generate_timeout_s: float,
    grace_s: float,
    when_late: Callable[[], RolloutEnded],
) -> None:
    """Have an `AgentEnv` fill in the rollout.

    Args:
        sampling: with the seed that the rollout's requests draw theirs from.
        grace_s: that the environment has to end once it is told that its time is up.
        when_late: makes what is raised where it goes on without end after its time is up.

    Raises:
        RolloutEnded: it raised, or filled in what is no rollout: ERROR_ENV. Or what `when_late` makes.
    """

    async def ask(
        prompt_token_ids: Sequence[int], *, request_id: str, session_id: str | None = None, sampling: SamplingParams
    ) -> Completion:
        own_id = request_ids.next(prompt_token_ids, sampling)
        async with limited(generate_timeout_s, "the completion"):
            completion = await generate_within(
                watch, generate, prompt_token_ids, request_id=own_id, session_id=session_id, sampling=sampling
            )
        if watch.is_over:
            time_is_up.set()
        return replace(completion, request_id=request_id)

    time_is_up = asyncio.Event()
    request_ids = RequestIds(rollout.rollout_id)
    policy = RolloutPolicy(
        rollout.rollout_id, ask, sampling, max_context, max_turns, watch.limit_s, time_is_up, watch.pause, env_rewards
    )
    try:
        async with (
            _telling_when_over(watch, time_is_up, grace_s=grace_s),
            EndsWith(RolloutStatus.ERROR_ENV, watch=watch),
        ):
            await env.play(policy, rollout)
            _check(rollout)
            rollout.turns = shared(rollout.turns)
    except OutOfTimeError:
        raise when_late() from None


@asynccontextmanager
async def _telling_when_over(watch: Stopwatch, time_is_up: asyncio.Event, grace_s: float) -> AsyncGenerator[None]:
    """Sets the event once the watch is over. The block may take so long after that.

    Raises:
        OutOfTimeError: it took longer.
    """
    scope = asyncio.timeout(None)

    async def look() -> None:
        while not watch.is_over:  # noqa: ASYNC110  it stands and goes on as requests wait
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
        raise OutOfTimeError(f"the environment goes on {grace_s:g} s after its time was up") from error
    finally:
        if looking is not None:
            looking.cancel()


def _check(rollout: Rollout) -> None:
    """Check what an environment has filled in, and keep its numbers as plain ones, which journals and logs take.

    Raises:
        TypeError: a turn is no `Turn`, or a metric or reward no number.
        ValueError: the status is no `RolloutStatus`.
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
