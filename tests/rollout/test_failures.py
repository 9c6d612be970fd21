"""Errors of rollouts: their locations, and the message about the most frequent one."""

from __future__ import annotations

from typing import Any

from titan_rl import Rollout, RolloutStatus, Rubric, SamplingParams
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.group.transcript import ErrorCounts, transcript
from titan_rl.rollout.rewards.reward import Reward


class Raising:
    """Environment whose `reset` fails, in every fourth sibling with a LookupError, else with a text that names it."""

    def __init__(self, sibling: int) -> None:
        self._sibling = sibling

    async def reset(self) -> Any:
        if self._sibling % 4 == 0:
            raise LookupError("no level")
        raise ConnectionError(f"sandbox {self._sibling} is gone")

    async def step(self, completion: Any) -> Any: ...

    async def close(self) -> None: ...


async def play(group_size: int) -> list[Rollout]:
    made: list[int] = []

    def make_env(sample: object) -> Any:
        made.append(0)
        return Raising(len(made) - 1)

    async def generate(*args: Any, **kwargs: Any) -> Any: ...

    rollouter = Rollouter(make_env, Rubric([Reward(lambda rollout: 1.0, name="one")]), max_context=8)
    group = await rollouter.run_group(
        generate, None, group_id="g", group_size=group_size, sampling=SamplingParams(max_tokens=1)
    )
    return group.rollouts


async def test_most_frequent_error_is_described_with_location_and_count():
    counts = ErrorCounts()
    counts.add(await play(8))
    counts.add([Rollout("g/8", "g", 8, None)])
    assert counts.num_errors == 8
    assert counts.describe().startswith(
        "8 of 9 rollouts were lost to errors, 6 of them to error_env: ConnectionError: sandbox 1 is gone ("
    )
    assert "test_failures.py:" in counts.describe()
    assert counts.describe().endswith("in reset)")
    assert [count for _, count in counts.most_common()] == [6, 2]


async def test_transcript_has_the_location_of_the_error():
    rollout = (await play(1))[0]
    assert (rollout.status, rollout.error) == (RolloutStatus.ERROR_ENV, "LookupError: no level")
    assert transcript(rollout)["error_at"].endswith("in reset")
    assert rollout.failure is not None
    assert 'raise LookupError("no level")' in rollout.failure.traceback


def test_description_is_empty_without_errors():
    counts = ErrorCounts()
    counts.add([Rollout("g/0", "g", 0, None)])
    assert counts.describe() == ""
