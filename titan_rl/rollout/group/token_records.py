"""The tokens of a rollout for a person to look at: what they say, how likely they were, what is learned from them."""

from __future__ import annotations

from typing import Any

from titan_rl.core.arrays import token_array
from titan_rl.rollout.contexts import num_shared
from titan_rl.rollout.renderer.token_texts import TokenTexts
from titan_rl.rollout.types import Rollout, RolloutStatus, Turn

_DIGITS = 4


class TokenRecords:
    """Makes what a transcript says of the tokens of each turn.

    Args:
        texts: None where nobody can read the tokens.
        max_token_age: tokens of versions that are older than the trained one by more are not trained.
    """

    def __init__(self, texts: TokenTexts | None, max_token_age: int | None = None) -> None:
        self._texts = texts
        self._max_token_age = max_token_age

    def of(self, rollout: Rollout, trained_at: int | None) -> list[dict[str, Any]]:
        """One for each turn.

        Args:
            trained_at: the version that learns from the rollout; None where none does.

        Returns:
            shared: how many tokens the prompt begins with that are those of the prompt and completion before it.
            prompt: `ids` and `text` of its other tokens.
            completion: `ids`, `text` and `logprobs`, as they were sampled, of its tokens.
            trained: whether they are learned from, as `build_samples` has it: one for all, or one for each.
            advantages: of the tokens: one for all, or one for each; None where there is none.
            A `text` is that of each token, see `TokenTexts`; None where nobody can read them.
        """
        records: list[dict[str, Any]] = []
        before: Turn | None = None
        for turn in rollout.turns:
            shared = num_shared(before, turn)
            prompt = token_array(turn.prompt_token_ids)[shared:].tolist()
            completion = token_array(turn.completion.token_ids).tolist()
            logprobs = [round(float(logprob), _DIGITS) + 0.0 for logprob in turn.completion.logprobs]
            records.append(
                {
                    "shared": shared,
                    "prompt": self._read(prompt),
                    "completion": {**self._read(completion), "logprobs": logprobs},
                    "trained": self._trained(rollout, turn, trained_at),
                    "advantages": _advantages(rollout, turn),
                }
            )
            before = turn
        return records

    def _read(self, token_ids: list[int]) -> dict[str, Any]:
        try:
            text = None if self._texts is None else self._texts.of(token_ids)
        except Exception:  # an environment may ask with tokens that the tokenizer does not have
            text = None
        return {"ids": token_ids, "text": text}

    def _trained(self, rollout: Rollout, turn: Turn, trained_at: int | None) -> bool | list[bool]:
        if trained_at is None or rollout.advantage is None:
            return False
        if rollout.status.is_fault or rollout.status is RolloutStatus.ABORTED:
            return False
        oldest = 0 if self._max_token_age is None else trained_at - self._max_token_age
        if all(span.version >= oldest for span in turn.completion.version_spans):
            return True
        return [version >= oldest for version in turn.completion.versions]


def _advantages(rollout: Rollout, turn: Turn) -> float | list[float] | None:
    if rollout.advantage is None:
        return None
    if turn.token_advantages is None:
        return round(rollout.advantage, _DIGITS)
    return [round(rollout.advantage + float(own), _DIGITS) for own in turn.token_advantages]
