"""What travels from the `GenerateFn` seam to an engine, whatever is between them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.arrays import token_array
from titan_rl.types import Completion, GenerateFn, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. Made where the `GenerateFn` seam is entered, as a router or an engine loop does, and
    passed on as it is from there to the engine. What is to cross the seam itself has to be in its arguments.

    `sampling.max_tokens` counts new tokens only. The prompt becomes an array, which nobody on the way can
    change; a tuple, for the engine to refuse, where there is something else than tokens in it.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # [num_prompt_tokens]
    sampling: SamplingParams
    session_id: str | None = None  # stable over the turns of one rollout

    def __post_init__(self) -> None:
        try:
            prompt = token_array(self.prompt_token_ids)
        except (TypeError, OverflowError):
            prompt = tuple(self.prompt_token_ids)
        object.__setattr__(self, "prompt_token_ids", prompt)

    @property
    def cost(self) -> int:
        """The most tokens that it can come to, prompt and completion: what a router reserves for it."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def after(self, token_ids: Sequence[int]) -> EngineRequest:
        """What is left of it once these tokens were generated: they join the prompt, and the budget is less by them."""
        if not token_ids:
            return self
        prompt = token_array(self.prompt_token_ids) + token_ids
        return replace(self, prompt_token_ids=prompt, sampling=self.sampling.after(len(token_ids)))

    def sent_to(self, generate: GenerateFn) -> Coroutine[Any, Any, Completion]:
        """The call of a `GenerateFn` with it. The prompt is a list of its own, to change as it likes."""
        return generate(
            list(self.prompt_token_ids),
            request_id=self.request_id,
            session_id=self.session_id,
            sampling=self.sampling,
        )


OnChunk = Callable[[TokenChunk], None]
"""Called with each chunk of a request, in order."""
