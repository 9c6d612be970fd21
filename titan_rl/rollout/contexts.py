"""The contexts of a rollout's turns: each turn adds to what was before it, and nothing is held twice."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace

from titan_rl.core.arrays import TOKENS, NumberArray, common_length, token_array
from titan_rl.rollout.types import Turn


class Contexts:
    """Those of one rollout. A hundred turns that come to 56,000 tokens take four bytes for each of the 56,000.

    The tokens of turns that go on from each other lie in one array, prompts and completions behind each other; the
    turns have windows on it. A turn whose history was rewritten begins another.

    Example: `Turn([7, 8], <5, 1>)` and `Turn([7, 8, 5, 1, 9], <6>)` have windows on `[7, 8, 5, 1, 9, 6]`.
    """

    def __init__(self) -> None:
        self._lines: list[array[int]] = []

    def add(self, turn: Turn) -> Turn:
        """The same turn, with windows in the place of its prompt and the tokens of its completion.

        Raises:
            TypeError: they are no token ids.
            OverflowError: one of them is too large for one.
        """
        prompt, said = token_array(turn.prompt_token_ids), token_array(turn.completion.token_ids)
        line = self._line_before(prompt)
        line.extend(prompt[len(line) :].array())
        line.extend(said.array())
        end = len(prompt)
        return replace(
            turn,
            prompt_token_ids=NumberArray(line, 0, end),
            completion=replace(turn.completion, token_ids=NumberArray(line, end, end + len(said))),
        )

    def _line_before(self, prompt: NumberArray[int]) -> array[int]:
        """What the prompt goes on from; a fresh one, where there is none."""
        for line in reversed(self._lines):
            num_tokens = len(line)
            if num_tokens <= len(prompt) and prompt[num_tokens - 1] == line[-1] and prompt[:num_tokens].array() == line:
                return line
        fresh = array(TOKENS)
        if prompt:
            self._lines.append(fresh)
        return fresh


def shared(turns: Iterable[Turn]) -> list[Turn]:
    """As `Contexts.add` makes them."""
    contexts = Contexts()
    return [contexts.add(turn) for turn in turns]


def num_shared(before: Turn | None, turn: Turn) -> int:
    """How many tokens the prompt of `turn` begins with that are those of the prompt and completion of `before`."""
    if before is None:
        return 0
    prompt = token_array(turn.prompt_token_ids)
    if (end := end_on_line(before)) is not None and (own := prompt.window()) is not None and own[0] is end[0]:
        return min(end[1], len(prompt))
    return common_length(context_after(before), prompt)


def goes_on(before: Turn, turn: Turn) -> bool:
    """Whether the prompt of `turn` begins with all tokens of `before`."""
    return num_shared(before, turn) == len(before.prompt_token_ids) + len(before.completion.token_ids)


def context_after(turn: Turn) -> NumberArray[int]:
    """Its prompt and its completion."""
    return token_array(turn.prompt_token_ids) + token_array(turn.completion.token_ids).array()


def end_on_line(turn: Turn) -> tuple[array[int], int] | None:
    """The array that a turn shares with others, and where its completion ends in it; None where it shares none."""
    prompt, said = token_array(turn.prompt_token_ids).window(), token_array(turn.completion.token_ids).window()
    if prompt is None or said is None or prompt[0] is not said[0] or prompt[2] != said[1] or prompt[1]:
        return None
    return said[0], said[2]
