"""The turns of one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from titan_rl.core.calls.stopwatch import Stopwatch
from titan_rl.rollout.contexts import Contexts
from titan_rl.rollout.group.boundary import EndsWith, RolloutEnded
from titan_rl.rollout.group.rollout_ids import turn_seed
from titan_rl.rollout.group.timed import generate_within
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn
from titan_rl.types import FinishReason, GenerateFn, SamplingParams


@dataclass(frozen=True, slots=True)
class TurnTaker:
    """Takes the turns of one rollout, within its limits.

    Args:
        sampling: with the seed that the turns draw theirs from, or with None.
        max_context: most tokens of prompt and completion together.
        generate_timeout_s: of one completion.
        when_late: makes what is raised when the time is used up.
    """

    rollout: Rollout
    generate: GenerateFn
    sampling: SamplingParams
    watch: Stopwatch
    max_context: int
    generate_timeout_s: float
    when_late: Callable[[], RolloutEnded]
    _contexts: Contexts = field(default_factory=Contexts, init=False)

    async def take(self, prompt: list[int]) -> bool:
        """Ask for the next completion, which is the rollout's last turn then.

        Args:
            prompt: the rollout's own.  # [num_prompt_tokens]

        Returns:
            whether the time was used up meanwhile, so that the completion is what there is of it.

        Raises:
            RolloutEnded: there is no time, or no room for a token; the completion was aborted, or generation failed.
        """
        if self.watch.is_over:
            raise self.when_late()
        rollout, turn = self.rollout, len(self.rollout.turns)
        sampling = self._sampling(turn, prompt)
        deadline = asyncio.get_running_loop().time() + self.generate_timeout_s
        async with EndsWith(RolloutStatus.ERROR_GENERATE, deadline):
            completion = await generate_within(
                self.watch,
                self.generate,
                list(prompt),
                request_id=f"{rollout.rollout_id}/{turn}",
                session_id=rollout.rollout_id,
                sampling=sampling,
            )
        is_cut = completion.finish_reason is FinishReason.ABORT and self.watch.is_over
        if is_cut and not completion.token_ids:
            raise self.when_late()
        if is_cut:
            completion = replace(completion, finish_reason=completion.ended or FinishReason.LENGTH, ended=None)
        rollout.turns.append(self._contexts.add(Turn(prompt, completion, sampling=sampling)))
        if completion.finish_reason is FinishReason.ABORT:
            raise RolloutEnded(RolloutStatus.ABORTED)
        return is_cut

    def _sampling(self, turn: int, prompt: list[int]) -> SamplingParams:
        room = self.max_context - len(prompt)
        if room < 1:
            raise RolloutEnded(
                RolloutStatus.TRUNCATED_PROMPT,
                f"the prompt of turn {turn} has {len(prompt)} tokens, max_context is {self.max_context}",
            )
        base = self.sampling.seed
        seed = None if base is None else turn_seed(base, self.rollout.rollout_id, turn)
        return replace(self.sampling.within(room), seed=seed)
