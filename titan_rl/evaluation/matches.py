"""Games between policies, for Elo ratings: two policies play a task with several seats, and alternate at the seats."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from titan_rl.core.errors import DataError
from titan_rl.evaluation.elo import Ratings, rate
from titan_rl.evaluation.suites import Suite
from titan_rl.rollout.group.transcript import ErrorCounts
from titan_rl.rollout.types import Rollout
from titan_rl.types import Completion, GenerateFn, SamplingParams


class Pair:
    """`GenerateFn` of two policies, in which the policy of a seat answers for that seat. The first policy has every
    other seat: beginning with the first seat in games with even numbers, and with the second seat in other games.

    Args:
        seats: Seats that are assigned to the policies, in order.
    """

    def __init__(self, first: GenerateFn, second: GenerateFn, seats: Sequence[str]) -> None:
        self._policies = (first, second)
        self._seats = list(seats)

    def policy_of(self, seat: str, sibling: int) -> int:
        """Return the index, 0 or 1, of the policy that has a seat in the game with the number `sibling`."""
        return (self._seats.index(seat) + sibling) % 2

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        assert session_id is not None, "the rollouts of seats have sessions"
        _, sibling, seat = session_id.rsplit("/", 2)
        generate = self._policies[self.policy_of(seat, int(sibling))]
        return await generate(prompt_token_ids, request_id=request_id, session_id=session_id, sampling=sampling)

    def results(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Result of the first policy in each game of a group: 1 if the mean reward of its seats is greater than that of
        the other policy, 0.5 if both are equal, and otherwise 0. A policy whose answer was cut off or could not be
        parsed loses if this ended the game before the rewards were given. Games with faults, or without rewards, have
        no result."""
        games: dict[int, tuple[list[Rollout], list[Rollout]]] = {}
        for rollout in rollouts:
            sides = games.setdefault(rollout.sibling, ([], []))
            sides[self.policy_of(str(rollout.seat), rollout.sibling)].append(rollout)
        found = (_result(*sides) for sides in games.values())
        return [result for result in found if result is not None]


def _result(own: Sequence[Rollout], other: Sequence[Rollout]) -> float | None:
    """Result of a game for the policy of the rollouts `own`; None if the game has no result."""
    if any(rollout.status.is_fault for rollout in (*own, *other)):
        return None
    rewards = [[rollout.reward for rollout in side if rollout.reward is not None] for side in (own, other)]
    if all(rewards):
        first, second = map(fmean, rewards)
        return 1.0 if first > second else 0.5 if first == second else 0.0
    failed = [any(rollout.status.is_truncated or rollout.status.is_error for rollout in side) for side in (own, other)]
    return None if failed[0] == failed[1] else float(failed[1])


async def play_matches(
    suite: Suite, seats: Sequence[str], policies: Mapping[str, GenerateFn], *, in_flight: int
) -> Ratings:
    """Have each pair of policies play the samples of a suite, and rate the policies.

    Args:
        seats: Seats that policies play in the suite's games; at least two.
        policies: Policies by name.
        in_flight: Most rollouts at a time. At least one group is always in flight.

    Raises:
        DataError: No game of some pair had a result.
    """
    names = list(policies)
    results: dict[tuple[int, int], list[float]] = {pair: [] for pair in combinations(range(len(names)), 2)}
    errors = ErrorCounts()
    slots = asyncio.Semaphore(max(1, in_flight // (suite.samples_per_prompt * len(seats))))

    async def play(i: int, j: int, index: int) -> None:
        pair = Pair(policies[names[i]], policies[names[j]], seats)
        async with slots:
            group = await suite.runner.run_group(
                pair,
                suite.prompts[index],
                group_id=f"elo-{suite.group_ids}-{i}-{j}-{index}",
                group_size=suite.samples_per_prompt,
                sampling=suite.sampling,
            )
        results[i, j] += pair.results(group.rollouts)
        errors.add_group(group)

    async with asyncio.TaskGroup() as tasks:
        for i, j in results:
            for index in range(len(suite.prompts)):
                tasks.create_task(play(i, j, index))
    if lost := next((pair for pair, of_pair in results.items() if not of_pair), None):
        pair = f"{names[lost[0]]} against {names[lost[1]]}"
        raise DataError(f"no game of {pair} had a result at task {suite.name}: {errors.describe()}")
    return rate(suite.name, names, results)
