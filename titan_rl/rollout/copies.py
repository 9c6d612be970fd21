"""A rollout's own copies of what it was given, which nobody else can change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, cast

from titan_rl.core.arrays import LARGEST_TOKEN_ID, TOKENS, NumberArray, expert_rows, logprob_array, token_array
from titan_rl.core.calls.plain import plain, safe_text, snapshot
from titan_rl.rollout.types import Message, Rollout
from titan_rl.types import Completion, float_or_none


def token_ids_of(given: Any, what: str) -> list[int]:
    """A list of its own with the given tokens.  # [num_tokens]

    Raises:
        TypeError: they are not integers.
        ValueError: one of them is no token id.
    """
    tokens: list[int] = []
    for place, token in enumerate(given):
        try:
            tokens.append(index(token))
        except TypeError as error:
            told = safe_text(token, repr)[:100]
            raise TypeError(f"{what} has {told} at {place}; token ids are integers") from error
    if tokens and not 0 <= min(tokens) <= max(tokens) <= LARGEST_TOKEN_ID:
        wrong = next(token for token in tokens if not 0 <= token <= LARGEST_TOKEN_ID)
        raise ValueError(f"{what} has token {wrong}; token ids are between 0 and {LARGEST_TOKEN_ID}")
    return tokens


def token_array_of(given: Any, what: str) -> NumberArray[int]:
    """As `token_ids_of`, packed."""
    if isinstance(given, NumberArray) and cast("NumberArray[Any]", given).typecode == TOKENS:
        tokens = cast("NumberArray[int]", given)
        if not tokens or tokens.least() >= 0:
            return tokens
    return token_array(token_ids_of(given, what))


def completion_of(given: Any, max_tokens: int) -> Completion:
    """What a `GenerateFn` gave, as the rollout's own copy. Routed experts and top logprobs, which may be large,
    are not copied.

    Args:
        max_tokens: that it was asked for.

    Raises:
        TypeError: it is no completion, or its tokens or logprobs are no numbers.
        ValueError: a logprob or a metric is not finite, or there are more tokens than were asked for.
    """
    if not isinstance(given, Completion):
        raise TypeError(f"generate gave {type(given).__name__}; it must give a Completion")
    if len(given.token_ids) > max_tokens:
        raise ValueError(
            f"generate gave {len(given.token_ids)} tokens; it was asked for sampling.max_tokens = {max_tokens} at most"
        )
    logprobs = _finite(given.logprobs)
    metrics = dict(given.metrics)
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"generate gave metrics[{name!r}] = {value}; it must be finite")
    token_ids = token_array_of(given.token_ids, "the completion")
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
        None if given.allowed_logprobs is None else _finite(given.allowed_logprobs),
    )


def _finite(logprobs: Sequence[float]) -> NumberArray[float]:
    try:
        packed = logprob_array(logprobs)
    except TypeError as error:
        wrong = next((one for one in logprobs if float_or_none(one) is None), logprobs)
        raise TypeError(f"generate gave a logprob of {safe_text(wrong, repr)[:100]}; each must be a number") from error
    if not packed.is_finite():
        wrong = next(logprob for logprob in packed if not math.isfinite(logprob))
        raise ValueError(f"generate gave a logprob of {wrong}; each must be finite")
    return packed


def completion_to_give(own: Completion) -> Completion:
    """A copy for user code: its tokens and logprobs are those of the rollout, which nobody can change, and the rest is
    to do with as it likes. Routed experts are training's, and left out, as are top logprobs, which no environment has
    asked for."""
    return Completion(
        own.request_id,
        token_array(own.token_ids),
        logprob_array(own.logprobs),
        own.finish_reason,
        list(own.version_spans),
        None,
        dict(own.metrics),
        own.ended,
    )


def token_advantages_of(given: Sequence[float] | None, completion: Completion) -> list[float] | None:
    """
    Raises:
        ValueError: there is not one finite number for each token of the completion.
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
    """The rollout for another process: its messages as plain data, and without its sample, which is there already."""
    return replace(rollout, sample=None, messages=[plain(message) for message in rollout.messages])
