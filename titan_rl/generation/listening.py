"""Tokens that are told of ahead of the completion which a `GenerateFn` returns, whatever is between who asks and the
router. The seam has no argument for it: who listens is known by the context of the call, and its tasks."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from titan_rl.core.arrays import TOKENS, token_array
from titan_rl.core.errors import GenerationError
from titan_rl.generation.partial import tokens_between
from titan_rl.generation.request import OnChunk
from titan_rl.types import Completion, TokenChunk

_listener: ContextVar[OnChunk | None] = ContextVar("listener", default=None)


def listener() -> OnChunk | None:
    """Who listens to the present call."""
    return _listener.get()


@contextmanager
def listening(on_chunk: OnChunk | None) -> Generator[None]:
    """Within the block calls of a `GenerateFn` tell `on_chunk` of tokens as they come, in order, as far as what is
    behind the function streams. What is told is the beginning of the completion; `told_whole` tells the rest."""
    token = _listener.set(on_chunk)
    try:
        yield
    finally:
        _listener.reset(token)


async def told_whole(ask: Callable[[OnChunk], Awaitable[Completion]], on_chunk: OnChunk) -> Completion:
    """The answer of `ask`, all of whose tokens `on_chunk` is told of, those that `ask` had not told at its end. Nothing
    is told after that.

    Raises:
        GenerationError: the answer has other tokens than were told of it.
    """
    told = array(TOKENS)
    is_over = False

    def tell(chunk: TokenChunk) -> None:
        if chunk.token_ids and not is_over:
            told.extend(token_array(chunk.token_ids).array())
            on_chunk(chunk)

    try:
        completion = await ask(tell)
    finally:
        is_over = True
    if not isinstance(completion, Completion):  # pyright: ignore[reportUnnecessaryIsInstance]
        return completion  # for who called to judge
    if token_array(completion.token_ids[: len(told)]).array() != told:
        raise GenerationError(f"request {completion.request_id!r} was answered with other tokens than it had streamed")
    if len(told) < len(completion.token_ids):
        on_chunk(tokens_between(completion, len(told), len(completion.token_ids)))
    return completion
