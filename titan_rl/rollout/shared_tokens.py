"""Shared storage of the token ids of a rollout's turns, and the prefixes that turns have in common."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from titan_rl.core.arrays import TOKENS, NumberArray, common_length, token_array
from titan_rl.core.pickling import replace_unchecked
from titan_rl.rollout.types import Turn


class TokenStorage:
    """Shared token storage of one rollout's turns, with four bytes for each token.

    Turns that continue each other share one buffer of prompts and completions, and have windows on it. A turn whose
    history was rewritten starts a new buffer.

    Example: `Turn([7, 8], <5, 1>)` and `Turn([7, 8, 5, 1, 9], <6>)` have windows on `[7, 8, 5, 1, 9, 6]`.
    """

    def __init__(self) -> None:
        self._buffers: list[array[int]] = []

    def add(self, turn: Turn) -> Turn:
        """Copy of a turn whose prompt and completion tokens are windows on a shared buffer.

        Raises:
            TypeError: the tokens are not integers.
            OverflowError: a token id is too large.
        """
        prompt, completion = token_array(turn.prompt_token_ids), token_array(turn.completion.token_ids)
        buffer = self._buffer_of(prompt)
        buffer.extend(prompt[len(buffer) :].array())
        buffer.extend(completion.array())
        end = len(prompt)
        return replace_unchecked(
            turn,
            prompt_token_ids=NumberArray(buffer, 0, end),
            completion=replace_unchecked(turn.completion, token_ids=NumberArray(buffer, end, end + len(completion))),
        )

    def _buffer_of(self, prompt: NumberArray[int]) -> array[int]:
        """Buffer that the prompt continues, or a new one."""
        for buffer in reversed(self._buffers):
            length = len(buffer)
            if length <= len(prompt) and prompt[length - 1] == buffer[-1] and prompt[:length].array() == buffer:
                return buffer
        fresh = array(TOKENS)
        if prompt:
            self._buffers.append(fresh)
        return fresh


def share_tokens(turns: Iterable[Turn]) -> list[Turn]:
    """Turns of one rollout with shared storage; see `TokenStorage`."""
    storage = TokenStorage()
    return [storage.add(turn) for turn in turns]


def num_shared(before: Turn | None, turn: Turn) -> int:
    """Number of leading prompt tokens of `turn` that equal the prompt and completion of `before`."""
    if before is None:
        return 0
    prompt = token_array(turn.prompt_token_ids)
    if (end := end_in_buffer(before)) is not None and (own := prompt.window()) is not None and own[0] is end[0]:
        return min(end[1], len(prompt))
    return common_length(context_after(before), prompt)


def extends(before: Turn, turn: Turn) -> bool:
    """Whether the prompt of `turn` begins with all tokens of `before`."""
    return num_shared(before, turn) == len(before.prompt_token_ids) + len(before.completion.token_ids)


def context_after(turn: Turn) -> NumberArray[int]:
    """Prompt and completion of a turn, joined."""
    return token_array(turn.prompt_token_ids) + token_array(turn.completion.token_ids).array()


def end_in_buffer(turn: Turn) -> tuple[array[int], int] | None:
    """Buffer that a turn shares with others, and the end of its completion in it; None if it shares none."""
    prompt, completion = token_array(turn.prompt_token_ids).window(), token_array(turn.completion.token_ids).window()
    if prompt is None or completion is None:
        return None
    (buffer, prompt_start, prompt_end), (other, completion_start, end) = prompt, completion
    is_shared = buffer is other and prompt_start == 0 and prompt_end == completion_start
    return (buffer, end) if is_shared else None
