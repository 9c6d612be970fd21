"""Checked copies of data that crosses between user code, engines and rollouts: tokens, completions, messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any

from titan_rl.core.arrays import LARGEST_TOKEN_ID, TOKENS, NumberArray, expert_rows, logprob_array, token_array
from titan_rl.core.pickling import replace_unchecked
from titan_rl.core.plain_data import plain, safe_repr, snapshot
from titan_rl.rollout.types import Message, Rollout
from titan_rl.types import Completion, float_or_none


def token_ids_of(given: Any, what: str) -> list[int]:
    """Checked copy of tokens.  # [num_tokens]

    Args:
        given: Any iterable.
        what: Name of the tokens in error messages.

    Raises:
        TypeError: a token is not an integer.
        ValueError: an integer is not a token id.
    """
    tokens: list[int] = list(given)
    if set(map(type, tokens)) - {int}:
        tokens = [_integer(token, position, what) for position, token in enumerate(tokens)]
    if tokens and not 0 <= min(tokens) <= max(tokens) <= LARGEST_TOKEN_ID:
        wrong = next(token for token in tokens if not 0 <= token <= LARGEST_TOKEN_ID)
        raise ValueError(f"{what} has token {wrong}; token ids are between 0 and {LARGEST_TOKEN_ID}")
    return tokens


def _integer(token: Any, position: int, what: str) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        return index(token)
    except TypeError as error:
        shown = safe_repr(token)[:100]
        raise TypeError(f"{what} has {shown} at {position}; token ids are integers") from error


def completion_of(given: Any, max_tokens: int) -> Completion:
    """Checked copy of the result of a `GenerateFn`. Routed experts and top logprobs, which may be large, are not
    copied.

    Args:
        given: Result of the function.
        max_tokens: Token budget of the request.

    Raises:
        TypeError: the result is not a `Completion`, or its tokens or logprobs are not numbers.
        ValueError: a logprob is positive, a logprob or a metric is not finite, or there are too many tokens.
    """
    if not isinstance(given, Completion):
        raise TypeError(f"generate returned {type(given).__name__}; it must return a Completion")
    if len(given.token_ids) > max_tokens:
        raise ValueError(
            f"generate returned {len(given.token_ids)} tokens; it must be at most sampling.max_tokens = {max_tokens}"
        )
    logprobs = _logprobs_of(given.logprobs)
    metrics = dict(given.metrics)
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"generate returned metrics[{name!r}] = {value}; it must be finite")
    token_ids = given.token_ids
    if not _are_packed(token_ids):
        token_ids = token_array(token_ids_of(token_ids, "the completion"))
    return Completion(
        given.request_id,
        token_ids,
        logprobs,
        given.finish_reason,
        list(given.version_spans),
        None if given.routed_experts is None else expert_rows(given.routed_experts),
        metrics,
        given.ended,
        given.top_logprobs,
        None if given.allowed_logprobs is None else _logprobs_of(given.allowed_logprobs),
    )


def _are_packed(tokens: Sequence[int]) -> bool:
    """Whether tokens are packed already, and not negative."""
    return isinstance(tokens, NumberArray) and tokens.typecode == TOKENS and (len(tokens) == 0 or tokens.least() >= 0)


ROUNDING = 1e-3
"""Largest logprob that counts as a rounded 0."""


def _logprobs_of(logprobs: Sequence[float]) -> NumberArray[float]:
    try:
        packed = logprob_array(logprobs)
    except TypeError as error:
        wrong = next((one for one in logprobs if float_or_none(one) is None), logprobs)
        raise TypeError(f"generate returned a logprob of {safe_repr(wrong)[:100]}; each must be a number") from error
    if packed and not (packed.least() > -math.inf and packed.most() <= ROUNDING):  # false for NaN
        wrong = next(logprob for logprob in packed if not -math.inf < logprob <= ROUNDING)
        raise ValueError(f"generate returned a logprob of {wrong:g}; each must be finite and at most 0")
    return packed


def completion_for_user(own: Completion) -> Completion:
    """Copy of a completion for user code, which may change it: tokens and logprobs are shared, but immutable. Routed
    experts and top logprobs are left out, since only training needs them."""
    return replace_unchecked(
        own,
        token_ids=token_array(own.token_ids),
        logprobs=logprob_array(own.logprobs),
        version_spans=list(own.version_spans),
        routed_experts=None,
        metrics=dict(own.metrics),
        top_logprobs=None,
        allowed_logprobs=None,
        prompt_scores=None,
    )


def token_advantages_of(given: Sequence[float] | None, completion: Completion) -> list[float] | None:
    """Checked copy of token advantages.

    Raises:
        ValueError: the values are not one finite number for each token of the completion.
    """
    if given is None:
        return None
    values, num_tokens = [float(advantage) for advantage in given], len(completion.token_ids)
    if len(values) != num_tokens or not all(map(math.isfinite, values)):
        raise ValueError(f"token_advantages = {values}; the completion's {num_tokens} tokens need a finite one each")
    return values


def messages_of(given: Sequence[Message]) -> Iterable[Message]:
    return map(snapshot, given)


def portable(rollout: Rollout) -> Rollout:
    """Copy of a rollout for another process: with messages as plain data, and without the sample, which that process
    has."""
    return replace(rollout, sample=None, messages=[plain(message) for message in rollout.messages])
