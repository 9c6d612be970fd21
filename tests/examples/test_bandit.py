"""Bandit example, in tokens."""

from __future__ import annotations

from typing import Any

from examples.bandit.task import Bandit
from titan_rl import Completion, FinishReason, Rollouter, RolloutGroup, SamplingParams, Task, VersionSpan


async def pull(task: Bandit, arm: Any, samples: int) -> list[RolloutGroup]:
    """Play groups in which the policy always pulls `arm(state)`."""

    async def generate(prompt_token_ids, *, request_id, session_id=None, sampling) -> Completion:
        return Completion(request_id, [arm(prompt_token_ids[-1])], [0.0], FinishReason.STOP, [VersionSpan(0, 1)])

    rollouter = Rollouter(lambda sample: task.make_env(sample, None), task.rubric(), max_context=32)  # type: ignore
    return [
        await rollouter.run_group(
            generate, sample, group_id=sample, group_size=2, sampling=SamplingParams(max_tokens=1)
        )
        for sample in task.validation_samples(samples)
    ]


def mean(groups: list[RolloutGroup]) -> float:
    rewards = [rollout.reward for group in groups for rollout in group.rollouts if rollout.reward is not None]
    return sum(rewards) / len(rewards)


async def test_matching_arm_pays_most() -> None:
    task = Bandit()
    assert isinstance(task, Task)
    assert mean(await pull(task, lambda state: state + 4 * 60, 100)) > 0.85
    assert mean(await pull(task, lambda state: state + 1, 100)) < 0.15


async def test_payouts_are_deterministic_on_replay() -> None:
    one, again = [await pull(Bandit(), lambda state: 2, 20) for _ in range(2)]
    assert [group.rollouts[0].reward for group in one] == [group.rollouts[0].reward for group in again]


async def test_prompt_contains_all_previous_states_and_pulls() -> None:
    (group,) = await pull(Bandit(rounds=3), lambda state: 7, 1)
    first, second, third = (list(turn.prompt_token_ids) for turn in group.rollouts[0].turns)
    assert third[:3] == second
    assert second[:2] == [*first, 7]
    assert len(third) == 5
