"""What a generator sends of its requests, as plain tuples. It pickles dozens of these between two engine steps, and
dataclasses and enums take several times as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.errors import TitanRLError
from titan_rl.types import Completion, FinishReason, TokenChunk, VersionSpan


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ended without a completion."""

    request_id: str
    error: TitanRLError  # which pickles


FromGenerator = TokenChunk | Completion | RequestFailed
"""Any number of chunks of a request, and then how it ended."""

Packed = tuple[Any, ...]


def pack(message: FromGenerator) -> Packed:
    """A tuple of builtin values, but for an error and routed experts."""
    match message:
        case TokenChunk():
            return (
                message.request_id,
                message.token_ids,
                message.logprobs,
                _pack_spans(message.version_spans),
                message.routed_experts,
            )
        case Completion():
            return (
                message.request_id,
                message.token_ids,
                message.logprobs,
                message.finish_reason.value,
                _pack_spans(message.version_spans),
                message.routed_experts,
                message.metrics,
                None if message.ended is None else message.ended.value,
            )
        case RequestFailed():
            return message.request_id, message.error


def unpack(packed: Packed) -> FromGenerator:
    """What `pack` was given."""
    match packed:
        case (request_id, token_ids, logprobs, spans, experts):
            return TokenChunk(request_id, token_ids, logprobs, _unpack_spans(spans), experts)
        case (request_id, token_ids, logprobs, reason, spans, experts, metrics, ended):
            return Completion(
                request_id,
                token_ids,
                logprobs,
                FinishReason(reason),
                _unpack_spans(spans),
                experts,
                metrics,
                None if ended is None else FinishReason(ended),
            )
        case (request_id, error):
            return RequestFailed(request_id, error)
        case _:
            raise ValueError(f"a generator sent a tuple of {len(packed)} values")


def _pack_spans(spans: Sequence[VersionSpan]) -> list[tuple[int, int]]:
    return [(span.version, span.num_tokens) for span in spans]


def _unpack_spans(spans: Sequence[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version, num_tokens) for version, num_tokens in spans)
