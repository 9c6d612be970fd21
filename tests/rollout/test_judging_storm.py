"""Random judges, pauses and cancellations: the group resolves, environments are closed, and rewards are all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import in_virtual_time

from titan_rl import Completion, FinishReason, SamplingParams, TokenObservation, TokenStep, VersionSpan
from titan_rl.core.errors import RewardError
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import FailurePolicy, GroupReward, Reward
from titan_rl.rollout.rewards.rubric import Rubric
from titan_rl.rollout.types import Rollout, RolloutGroup, RolloutStatus

LIMIT_S = 30.0


@dataclass(frozen=True)
class Sibling:
    plays_s: int
    status: RolloutStatus
    judge: str
    judged_s: int


JUDGES = ["ok", "fails once", "fails", "hangs", "cancels itself", "stubborn"] + ["slow to clean up"] * 3
SIBLINGS = st.builds(
    Sibling,
    st.sampled_from([0, 0, 2]),
    st.sampled_from([RolloutStatus.COMPLETED] * 4 + [RolloutStatus.ERROR_PARSE, RolloutStatus.ABORTED]),
    st.sampled_from(JUDGES),
    st.sampled_from([0, 1, 20, 20]),
)
POLICIES = st.builds(FailurePolicy, st.integers(0, 2), st.just(2.0), st.sampled_from(["drop_group", "fail_run"]))


class Storm:
    def __init__(self, siblings: Sequence[Sibling], policy: FailurePolicy) -> None:
        self.siblings = siblings
        self.made: list[Storm.Env] = []
        self.failed_once: set[int] = set()
        self.rollouter = Rollouter(
            lambda _: self.make_env(),
            Rubric(
                [Reward(self.judge, on_failure=policy), GroupReward(self.rank)], error_reward=-1.0, timeout_s=LIMIT_S
            ),
            max_context=64,
        )

    class Env:
        def __init__(self, storm: Storm) -> None:
            self.storm = storm
            self.closed = 0

        async def reset(self) -> TokenObservation:
            return TokenObservation([1])

        async def step(self, completion: Completion) -> TokenStep:
            return TokenStep(status=self.storm.siblings[int(completion.request_id.split("/")[1])].status)

        async def close(self) -> None:
            self.closed += 1

    def make_env(self) -> Env:
        self.made.append(self.Env(self))
        return self.made[-1]

    async def generate(self, prompt_token_ids: Sequence[int], *, request_id: str, **_: Any) -> Completion:
        await asyncio.sleep(self.siblings[int(request_id.split("/")[1])].plays_s)
        return Completion(request_id, [5], [-0.5], FinishReason.STOP, (VersionSpan(0, 1),))

    async def judge(self, rollout: Rollout) -> float:
        sibling = self.siblings[rollout.sibling]
        try:
            await asyncio.sleep(1e6 if sibling.judge == "hangs" else sibling.judged_s)
        except asyncio.CancelledError:
            if sibling.judge == "slow to clean up":
                await asyncio.sleep(4.0)
            if sibling.judge == "stubborn":
                return 7.0
            raise
        if sibling.judge == "cancels itself":
            call = asyncio.ensure_future(asyncio.sleep(1.0))
            call.cancel()
            await call
        first = rollout.sibling not in self.failed_once
        self.failed_once.add(rollout.sibling)
        if sibling.judge == "fails" or (sibling.judge == "fails once" and first):
            raise ValueError(rollout.rollout_id)
        return float(rollout.sibling)

    def rank(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [0.0] * len(rollouts)

    async def play(self, pauses: Sequence[tuple[int, int]], cancel_at: int | None) -> None:
        loop = asyncio.get_running_loop()
        playing = asyncio.ensure_future(
            self.rollouter.run_group(
                self.generate,
                None,
                group_id="g",
                group_size=len(self.siblings),
                sampling=SamplingParams(max_tokens=4),
            )
        )
        for start, length in pauses:
            loop.call_later(start, self.rollouter.pause_judging)
            loop.call_later(start + length, self.rollouter.resume_judging)
        cancelled_at: list[float] = []
        if cancel_at is not None:
            loop.call_later(cancel_at, lambda: cancelled_at.append(loop.time()) if playing.cancel() else None)
        await asyncio.wait({playing}, timeout=2000.0)

        assert playing.done()
        assert [env.closed for env in self.made] == [1] * len(self.siblings)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert playing.cancelled() == bool(cancelled_at)
        if cancelled_at:
            assert loop.time() - cancelled_at[0] <= 11.0  # two times to clean up
        elif (error := playing.exception()) is not None:
            assert isinstance(error, RewardError)
            assert error.ends_run
        else:
            self.check(playing.result())

    def check(self, group: RolloutGroup) -> None:
        rewards = [rollout.reward for rollout in group.rollouts]
        doomed = {"fails", "hangs", "cancels itself"}
        if group.failure is not None or group.is_aborted:
            assert rewards == [None] * len(rewards)
            assert all(rollout.advantage is None and not rollout.reward_breakdown for rollout in group.rollouts)
        else:
            assert not any(s.judge in doomed and s.status is RolloutStatus.COMPLETED for s in self.siblings)
            assert all(rollout.advantage is not None for rollout in group.rollouts)
            for rollout, sibling in zip(group.rollouts, self.siblings, strict=True):
                expected = [-1.0] if sibling.status is RolloutStatus.ERROR_PARSE else [rollout.sibling / 2, 3.5]
                assert rollout.reward in expected
        assert group.failure is None or any(s.judge != "ok" for s in self.siblings)


@given(
    siblings=st.lists(SIBLINGS, min_size=1, max_size=4),
    policy=POLICIES,
    pauses=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([2, 40, 40])), max_size=2),
    cancel_at=st.sampled_from([None, None, 0, 1, 3, 5, 6, 7, 12]),
)
@settings(max_examples=examples(200), deadline=None)
def test_group_resolves_and_its_rewards_are_all_or_none(siblings, policy, pauses, cancel_at) -> None:
    in_virtual_time(Storm(siblings, policy).play(pauses, cancel_at))
