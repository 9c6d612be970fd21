"""What a generator sends of its requests, as plain tuples, with tokens and logprobs as the bytes of their arrays. It
pickles dozens of these between two engine steps, and dataclasses and enums take several times as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from titan_rl.core.arrays import LOGPROBS, TOKENS, array_from_bytes, logprob_array, token_array
from titan_rl.core.errors import TitanRLError
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
                token_array(message.token_ids).tobytes(),
                logprob_array(message.logprobs).tobytes(),
                _pack_spans(message.version_spans),
                message.routed_experts,
                message.top_logprobs,
                _pack_allowed(message.allowed_logprobs),
            )
        case Completion():
            return (
                message.request_id,
                token_array(message.token_ids).tobytes(),
                logprob_array(message.logprobs).tobytes(),
                message.finish_reason.value,
                _pack_spans(message.version_spans),
                message.routed_experts,
                message.metrics,
                None if message.ended is None else message.ended.value,
                message.top_logprobs,
                _pack_allowed(message.allowed_logprobs),
            )
        case RequestFailed():
            return message.request_id, message.error


def unpack(packed: Packed) -> FromGenerator:
    """What `pack` was given."""
    match packed:
        case (request_id, token_ids, logprobs, spans, experts, top, allowed):
            return TokenChunk(
                request_id,
                array_from_bytes(TOKENS, token_ids),
                array_from_bytes(LOGPROBS, logprobs),
                _unpack_spans(spans),
                experts,
                top,
                _unpack_allowed(allowed),
            )
        case (request_id, token_ids, logprobs, reason, spans, experts, metrics, ended, top, allowed):
            return Completion(
                request_id,
                array_from_bytes(TOKENS, token_ids),
                array_from_bytes(LOGPROBS, logprobs),
                FinishReason(reason),
                _unpack_spans(spans),
                experts,
                metrics,
                None if ended is None else FinishReason(ended),
                top,
                _unpack_allowed(allowed),
            )
        case (request_id, error):
            return RequestFailed(request_id, error)
        case _:
            raise ValueError(f"a generator sent a tuple of {len(packed)} values")


def _pack_allowed(logprobs: Sequence[float] | None) -> bytes | None:
    return None if logprobs is None else logprob_array(logprobs).tobytes()


def _unpack_allowed(packed: bytes | None) -> Sequence[float] | None:
    return None if packed is None else array_from_bytes(LOGPROBS, packed)


def _pack_spans(spans: Sequence[VersionSpan]) -> tuple[tuple[int, int], ...]:
    return tuple([(span.version, span.num_tokens) for span in spans])


@lru_cache(maxsize=1024)  # most chunks of a version have as many tokens
def _unpack_spans(spans: tuple[tuple[int, int], ...]) -> tuple[VersionSpan, ...]:
    return tuple([VersionSpan(version, num_tokens) for version, num_tokens in spans])
