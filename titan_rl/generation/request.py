"""What travels from the `GenerateFn` seam to an engine, whatever is between them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from titan_rl.core.arrays import LARGEST_TOKEN_ID, token_array
from titan_rl.core.calls.plain import safe_text
from titan_rl.core.errors import RequestError
from titan_rl.types import Completion, GenerateFn, SamplingParams, TokenChunk


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. Made where the `GenerateFn` seam is entered, as a router or an engine loop does, and
    passed on as it is from there to the engine. What is to cross the seam itself has to be in its arguments.

    `sampling.max_tokens` counts new tokens only. The prompt becomes an array, which nobody on the way can change.

    Raises:
        RequestError: the prompt has something else in it than token ids, which are integers from 0 to 2**31 - 1; or an
            ID is no text that UTF-8 can encode; or the sampling is no `SamplingParams`.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # [num_prompt_tokens]
    sampling: SamplingParams
    session_id: str | None = None  # stable over the turns of one rollout

    def __post_init__(self) -> None:
        try:
            prompt = token_array(self.prompt_token_ids)
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"the prompt of request {self.request_id!r} has something else than token ids, which are integers from "
                f"0 to {LARGEST_TOKEN_ID}: {_stranger(self.prompt_token_ids)}"
            ) from error
        if prompt and (least := prompt.least()) < 0:
            raise RequestError(f"the prompt of request {self.request_id!r} has token {least}; none is negative")
        object.__setattr__(self, "prompt_token_ids", prompt)
        sampling: object = self.sampling
        if not isinstance(sampling, SamplingParams):
            told = safe_text(sampling, repr)[:100]
            raise RequestError(f"sampling of request {self.request_id!r} is {told}; it must be a SamplingParams")
        for name, text in (("request_id", self.request_id), ("session_id", self.session_id)):
            if not _is_text(text) and (text is not None or name == "request_id"):
                raise RequestError(f"{name} is {safe_text(text, ascii)[:100]}; it must be text that UTF-8 can encode")

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


def _is_text(text: Any) -> bool:
    """Not so of half a surrogate pair: strategies hash IDs, and they go over the wire."""
    if not isinstance(text, str):
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _stranger(prompt: Any) -> str:
    """The first thing in a prompt that is no token id."""
    try:
        tokens = list(prompt)
    except Exception:
        return f"it is {safe_text(prompt, repr)[:100]}"
    for place, token in enumerate(tokens):
        try:
            if 0 <= index(token) <= LARGEST_TOKEN_ID:
                continue
        except Exception:  # `index` runs code of the object
            pass
        return f"token {place} is {safe_text(token, repr)[:100]}"
    return f"it is a {type(prompt).__name__}"


OnChunk = Callable[[TokenChunk], None]
"""Called with each chunk of a request, in order."""
