"""A rollouter over a scripted environment and generator."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl import (
    Completion,
    FinishReason,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    TokenObservation,
    TokenStep,
    VersionSpan,
)
from titan_rl.rollout.group.rollouter import Rollouter
from titan_rl.rollout.rewards.reward import Reward
from titan_rl.rollout.rewards.rubric import Rubric

Hook = Callable[["Env"], Coroutine[Any, Any, None]]


async def nothing(env: "Env") -> None: ...


@dataclass
class Env:
    """Environment of `turns` turns. In each method, its hook runs first."""

    turns: int = 2
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    on_reset: Hook = nothing
    on_step: Hook = nothing
    on_close: Hook = nothing
    steps: int = 0
    closed: int = 0

    async def reset(self) -> TokenObservation:
        await self.on_reset(self)
        return TokenObservation(self.prompt, [{"role": "user", "content": "go"}])

    async def step(self, completion: Completion) -> TokenStep:
        self.steps += 1
        await self.on_step(self)
        answer = [{"role": "assistant", "content": str(list(completion.token_ids))}]
        if self.steps == self.turns:
            return TokenStep(status=RolloutStatus.COMPLETED, rewards={"last": 1.0}, messages=answer)
        self.prompt = [*self.prompt, *completion.token_ids, 7]
        return TokenStep(self.prompt, rewards={"so_far": 0.5}, messages=answer)

    async def close(self) -> None:
        self.closed += 1
        await self.on_close(self)


@dataclass
class Generator:
    """`GenerateFn` that returns two tokens and records each call."""

    finish_reason: FinishReason = FinishReason.STOP
    fail: Exception | None = None
    fail_at: str = ""  # suffix of the request ids that fail or get `finish_reason`
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def __call__(
        self,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str,
        session_id: str | None = None,
        sampling: SamplingParams,
    ) -> Completion:
        self.calls.append(
            {"prompt": list(prompt_token_ids), "request": request_id, "session": session_id, "sampling": sampling}
        )
        await asyncio.sleep(0)
        is_hit = request_id.endswith(self.fail_at)
        if self.fail is not None and is_hit:
            raise self.fail
        reason = self.finish_reason if is_hit else FinishReason.STOP
        return Completion(request_id, [5, 6], [-0.5, -0.1], reason, (VersionSpan(3, 1), VersionSpan(4, 1)))


def by_sibling(rollout: Rollout) -> float:
    return float(rollout.sibling)


class Stage:
    """Rollouter over `Env` that records its environments and finished sessions."""

    def __init__(
        self, make: Callable[[Any], Env] = lambda sample: Env(), rubric: Rubric | None = None, **kwargs: Any
    ) -> None:
        self.envs: list[Env] = []
        self.finished: list[str] = []

        def make_env(sample: Any) -> Env:
            self.envs.append(make(sample))
            return self.envs[-1]

        kwargs = {"max_context": 100} | kwargs
        self.rollouter = Rollouter(
            make_env, rubric or Rubric([Reward(by_sibling)]), finish_session=self.finished.append, **kwargs
        )

    async def group(
        self, generate: Any, size: int = 1, on_finished: Callable[[Rollout], None] | None = None, **sampling: Any
    ) -> RolloutGroup:
        params = SamplingParams(**({"max_tokens": 10} | sampling))
        return await self.rollouter.run_group(
            generate, "sample", group_id="g", group_size=size, sampling=params, on_finished=on_finished
        )

    def all_released(self, size: int = 1) -> bool:
        return [env.closed for env in self.envs] == [1] * size and sorted(self.finished) == [
            f"g/{i}" for i in range(size)
        ]
