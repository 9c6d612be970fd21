"""Tokens of which only the number counts."""

from __future__ import annotations

from array import array

from titan_rl.core.arrays import LOGPROBS, TOKENS, NumberArray


def some_tokens(count: int) -> NumberArray[int]:
    return NumberArray(array(TOKENS, (0,)) * count)


def some_logprobs(count: int) -> NumberArray[float]:
    return NumberArray(array(LOGPROBS, (0.0,)) * count)
