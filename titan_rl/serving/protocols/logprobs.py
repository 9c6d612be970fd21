"""Logprobs of tokens, in the forms of OpenAI's protocols. They are those of the distribution sampled from."""

from __future__ import annotations

from typing import Any

from titan_rl.serving import LEAST_LOGPROB
from titan_rl.serving.conversations.reply import Delta
from titan_rl.serving.policy.text import Text
from titan_rl.types import Completion, TokenChunk

Tokens = Completion | TokenChunk | Delta


def token_logprobs(text: Text, tokens: Tokens) -> list[dict[str, Any]]:
    """In the form of chat: each token with the likeliest ones in its place, where they were asked for.

    Example, of a token that was the second likeliest, with `top_logprobs` of 2:

        [{"token": "b", "logprob": -1.1, "bytes": [98], "top_logprobs": [
            {"token": "a", "logprob": -0.7, "bytes": [97]}, {"token": "b", "logprob": -1.1, "bytes": [98]}]}]
    """
    told = [_told(text, *pair) for pair in zip(tokens.token_ids, tokens.logprobs, strict=True)]
    if tokens.top_logprobs is None:
        return [{**one, "top_logprobs": ()} for one in told]
    return [
        {**one, "top_logprobs": [_told(text, *pair) for pair in top]}
        for one, top in zip(told, tokens.top_logprobs, strict=True)
    ]


def top_by_text(text: Text, tokens: Tokens) -> list[dict[str, float]] | None:
    """In the form of text completions: by their text the likeliest tokens in each place, and the sampled one if it is
    none of them. Of tokens with the same text, the likeliest."""
    if tokens.top_logprobs is None:
        return None
    told: list[dict[str, float]] = []
    for token_id, logprob, top in zip(tokens.token_ids, tokens.logprobs, tokens.top_logprobs, strict=True):
        told.append({})
        for other, value in (*top, (token_id, logprob)):
            told[-1].setdefault(text.piece(other), max(value, LEAST_LOGPROB))
    return told


def _told(text: Text, token_id: int, logprob: float) -> dict[str, Any]:
    piece = text.piece(token_id)
    in_bytes = None if "\ufffd" in piece else list(piece.encode())  # else its bytes are part of a character
    return {"token": piece, "logprob": max(logprob, LEAST_LOGPROB), "bytes": in_bytes}
