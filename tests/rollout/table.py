"""Scripted games in tokens, and a generator whose outcomes depend on the request id."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from titan_rl import (
    Completion,
    FinishReason,
    Player,
    RolloutConfig,
    Rollouter,
    RolloutGroup,
    Rubric,
    SamplingParams,
    TokenSeat,
    VersionSpan,
    env_reward,
)

Seats = Mapping[str, TokenSeat]
Course = Callable[[Seats], Awaitable[None]]
BOTH: dict[str, Player] = {"first": "policy", "second": "policy"}


class Hand:
    """Scripted game that records its end."""

    def __init__(self, course: Course, players: Mapping[str, Player]) -> None:
        self._course = course
        self._players = players
        self.closed = 0
        self.cancelled = False

    def players(self, sibling: int) -> Mapping[str, Player]:
        return self._players

    async def play_seats(self, seats: Seats) -> None:
        try:
            await self._course(seats)
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def close(self) -> None:
        self.closed += 1


class Answers:
    """`GenerateFn` whose answers are a function of prompt and seed. Records its requests.

    Args:
        by_request: Outcomes of requests by the suffix of their id: an exception to raise, or a finish reason.
    """

    def __init__(self, by_request: Mapping[str, Exception | FinishReason] | None = None, delay_s: float = 0.0) -> None:
        self.requests: list[str] = []
        self.sessions: set[str | None] = set()
        self.cancelled: list[str] = []
        self._by_request = by_request or {}
        self._delay_s = delay_s

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        self.requests.append(request_id)
        self.sessions.add(session_id)
        try:
            await asyncio.sleep(self._delay_s)
        except asyncio.CancelledError:
            self.cancelled.append(request_id)
            raise
        outcome = next(
            (outcome for end, outcome in self._by_request.items() if request_id.endswith(end)), FinishReason.STOP
        )
        if isinstance(outcome, Exception):
            raise outcome
        token = (sum(prompt_token_ids) + (sampling.seed or 0)) % 1000
        return Completion(request_id, [token, 1], [-0.5, -0.1], outcome, (VersionSpan(3, 2),))


async def turn(seat: TokenSeat, prompt: Sequence[int]) -> list[int]:
    """Take a turn, and return the prompt of the next one."""
    completion = await seat.generate(prompt)
    return [*prompt, *completion.token_ids, 7]


class Table:
    """Rollouter over scripted games that records its games and finished sessions."""

    def __init__(self, course: Course, players: Mapping[str, Player] = BOTH, **kwargs: Any) -> None:
        self.hands: list[Hand] = []
        self.finished: list[str] = []

        def make_env(sample: Any) -> Hand:
            self.hands.append(Hand(course, players))
            return self.hands[-1]

        limits = kwargs.pop("limits", RolloutConfig(rollout_timeout_s=30.0, env_timeout_s=5.0))
        rubric = kwargs.pop("rubric", Rubric([env_reward("won")]))
        self.rollouter = Rollouter(
            make_env, rubric, max_context=100, limits=limits, finish_session=self.finished.append, **kwargs
        )

    async def group(self, generate: Any, size: int = 1, **kwargs: Any) -> RolloutGroup:
        sampling = SamplingParams(max_tokens=10)
        return await self.rollouter.run_group(
            generate, "sample", group_id="g", group_size=size, sampling=sampling, **kwargs
        )
