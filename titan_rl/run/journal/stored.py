"""How completions and turns lie in a journal: tokens as bytes, and of each turn what it adds to the one before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from titan_rl.core.arrays import (
    LOGPROBS,
    TOKENS,
    ExpertRows,
    array_from_bytes,
    expert_rows,
    logprob_array,
    token_array,
)
from titan_rl.rollout.contexts import Contexts, context_after, end_on_line, num_shared
from titan_rl.rollout.types import Rollout, Turn
from titan_rl.types import Completion, FinishReason, SamplingParams, VersionSpan


class StoredExperts(msgspec.Struct, array_like=True, frozen=True):
    """Two bytes for each expert."""

    num_layers: int
    top_k: int
    values: bytes


class StoredCompletion(msgspec.Struct, array_like=True, frozen=True):
    """Four bytes for each token, and eight for its logprob."""

    request_id: str
    token_ids: bytes
    logprobs: bytes
    finish_reason: FinishReason
    version_spans: list[tuple[int, int]]
    routed_experts: StoredExperts | None
    metrics: dict[str, float]
    ended: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]] | None
    allowed_logprobs: bytes | None = None


class StoredTurn(msgspec.Struct, array_like=True, frozen=True):
    """Its prompt is the first `num_shared` tokens of the prompt and completion of turn `base`, and `added`."""

    base: int  # of the same rollout; of no meaning where nothing is shared
    num_shared: int
    added: bytes
    completion: StoredCompletion
    rewards: dict[str, float]
    token_advantages: bytes | None
    sampling: SamplingParams | None


class StoredRollout(msgspec.Struct, array_like=True, frozen=True):
    """
    Args:
        rollout: without its turns.
    """

    rollout: Rollout
    turns: list[StoredTurn]


def stored_completion(completion: Completion) -> StoredCompletion:
    experts = completion.routed_experts
    rows = None if experts is None else expert_rows(experts)
    return StoredCompletion(
        completion.request_id,
        token_array(completion.token_ids).tobytes(),
        logprob_array(completion.logprobs).tobytes(),
        completion.finish_reason,
        [(span.version, span.num_tokens) for span in completion.version_spans],
        None if rows is None else StoredExperts(rows.num_layers, rows.top_k, rows.tobytes()),
        dict(completion.metrics),
        completion.ended,
        _top(completion.top_logprobs),
        None if completion.allowed_logprobs is None else logprob_array(completion.allowed_logprobs).tobytes(),
    )


def completion_of(stored: StoredCompletion) -> Completion:
    """
    Raises:
        ValueError: its parts do not fit each other.
    """
    return Completion(
        stored.request_id,
        array_from_bytes(TOKENS, stored.token_ids),
        array_from_bytes(LOGPROBS, stored.logprobs),
        stored.finish_reason,
        [VersionSpan(*span) for span in stored.version_spans],
        None if stored.routed_experts is None else _experts_of(stored.routed_experts),
        stored.metrics,
        stored.ended,
        stored.top_logprobs,
        None if stored.allowed_logprobs is None else array_from_bytes(LOGPROBS, stored.allowed_logprobs),
    )


def stored_rollout(rollout: Rollout) -> StoredRollout:
    turns: list[StoredTurn] = []
    last_on_line: dict[int, int] = {}  # by the identity of the array that turns share
    for place, turn in enumerate(rollout.turns):
        prompt = token_array(turn.prompt_token_ids)
        window = prompt.window()
        base = place - 1 if window is None else last_on_line.get(id(window[0]), place - 1)
        count = num_shared(rollout.turns[base], turn) if base >= 0 else 0
        advantages = turn.token_advantages
        turns.append(
            StoredTurn(
                base,
                count,
                prompt[count:].tobytes(),
                stored_completion(turn.completion),
                dict(turn.rewards),
                None if advantages is None else logprob_array(advantages).tobytes(),
                turn.sampling,
            )
        )
        if (end := end_on_line(turn)) is not None:
            last_on_line[id(end[0])] = place
    return StoredRollout(replace(rollout, turns=[]), turns)


def rollout_of(stored: StoredRollout) -> Rollout:
    """
    Raises:
        ValueError: its parts do not fit each other.
    """
    turns: list[Turn] = []
    contexts = Contexts()
    for turn in stored.turns:
        prompt = array_from_bytes(TOKENS, turn.added)
        if turn.num_shared:
            if not 0 <= turn.base < len(turns):
                raise ValueError(f"turn {len(turns)} goes on from turn {turn.base}, which is not before it")
            prompt = context_after(turns[turn.base])[: turn.num_shared] + prompt
        advantages = turn.token_advantages
        turns.append(
            contexts.add(
                Turn(
                    prompt,
                    completion_of(turn.completion),
                    turn.rewards,
                    None if advantages is None else array_from_bytes(LOGPROBS, advantages),
                    turn.sampling,
                )
            )
        )
    return replace(stored.rollout, turns=turns)


def _top(rows: Sequence[Sequence[tuple[int, float]]] | None) -> list[list[tuple[int, float]]] | None:
    if rows is None:
        return None
    return [[(int(token), float(logprob)) for token, logprob in row] for row in rows]  # which may be NumPy's


def _experts_of(stored: StoredExperts) -> ExpertRows:
    values: array[int] = array("H")
    values.frombytes(stored.values)
    if stored.num_layers < 1 or stored.top_k < 1:
        raise ValueError(f"experts of {stored.num_layers} layers, {stored.top_k} in each")
    return ExpertRows(values, stored.num_layers, stored.top_k)
